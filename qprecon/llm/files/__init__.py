"""A model as files, here or on the hub: what can be one, which of its files hold the weights, what kind of model they are."""

from qprecon.llm import check_installed

check_installed()
