"""The model as it is given: its blocks, linear layers and experts, and how it is loaded."""

from qprecon.llm import import_libraries

import_libraries()
