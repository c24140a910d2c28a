"""Tasks through lm-eval: local files make the very requests that lm-eval's own configurations make of the hub's rows."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from qprecon import cli
from qprecon.llm.evaluation import assessment, task_names, tasks
from qprecon.llm.evaluation.asked import named_tasks
from qprecon.llm.evaluation.assessment import EVALUATION_NAME, Evaluation, _add, evaluate
from qprecon.llm.evaluation.local_tasks import LOCAL_TASKS, local_task
from qprecon.llm.evaluation.scores import PAPER_TASKS, TaskScore, TaskScores, task_score
from qprecon.llm.evaluation.tasks import _from_hub, _remembering, evaluate_tasks
from tests.llm.evaluation.toy_tasks import ROWS, write_tasks
from tests.llm.toy_text import toy_llama, toy_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qprecon[eval]'")
tasks_of_lm_eval = pytest.importorskip("lm_eval.tasks").TaskManager

PACKAGED = {
    "piqa": "piqa/piqa", "arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge", "hellaswag": "hellaswag/hellaswag",
    "openbookqa": "openbookqa/openbookqa", "winogrande": "winogrande/default", "lambada_openai": "lambada/lambada_openai",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model():
    return toy_llama(positions=256)


def hub_rows(name):
    """The rows as the hub's data sets have them."""
    if name in ("arc_easy", "arc_challenge", "openbookqa"):
        question = "question_stem" if name == "openbookqa" else "question"
        labels = "ABCDE"
        return [
            {question: r["question"], "choices": {"text": r["choices"], "label": list(labels[: len(r["choices"])])},
             "answerKey": labels[r["label"]]} for r in ROWS[name]
        ]  # fmt: skip
    if name == "winogrande":
        return [{**row, "answer": str(row["answer"])} for row in ROWS[name]]
    if name == "hellaswag":
        # What the original data set says of the rows that lack it.
        parts = [None, ("Swim", "w1 w2. w3.", "he W4"), ("Bake", "w1 w2. W3 w4.", "")]
        return [
            row if part is None else {**row, "activity_label": part[0], "ctx_a": part[1], "ctx_b": part[2]}
            for row, part in zip(ROWS[name], parts, strict=True)
        ]
    return ROWS[name]


def packaged(path, rows):
    """lm-eval's own configuration of a task, on rows in memory."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / f"{path}.yaml", resolve_func=True)
    for key in ("dataset_path", "dataset_name", "training_split", "validation_split", "fewshot_split", "fewshot_config", "tag"):
        config.pop(key, None)
    documents = Dataset.from_list([{k: v for k, v in row.items() if k != "ctx"} for row in rows])
    return ConfigurableTask(config={**config, "test_split": "test", "custom_dataset": lambda **_: {"test": documents}})


def requests(task):
    """Every request as (item, which choice, context, continuation), and every item's label."""
    task.build_all_requests(rank=0, world_size=1)
    made = [(r.doc_id, r.idx, *r.args) for r in task.instances]
    multiple = task.config.output_type == "multiple_choice"
    document = task.doc_to_text if task.multiple_input else task.doc_to_target
    return made, [document(doc) for doc in task.test_docs()] if multiple else None


@pytest.mark.parametrize("name", sorted(PACKAGED))
def test_local_files_make_the_requests_of_lm_evals_own_configuration(data, name):
    mine, my_labels = requests(local_task(name, data))
    theirs, labels = requests(packaged(PACKAGED[name], hub_rows(name)))
    assert mine == theirs and my_labels == labels and len(mine) >= 2


def test_two_files_for_one_task_are_refused_by_name(data, tmp_path):
    (tmp_path / "piqa_valid.jsonl").write_bytes(b"{}")
    (tmp_path / "piqa_validation.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="task 'piqa': .* has piqa_valid.jsonl and piqa_validation.jsonl.gz; keep the one"):
        local_task("piqa", tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder: .*nowhere"):
        local_task("piqa", tmp_path / "nowhere")


@pytest.mark.parametrize("subject", ["astronomy", "high_school_physics"])
def test_mmlu_has_each_subjects_header(data, subject):
    rows = [{**row, "answer": row["label"]} for row in ROWS["mmlu"] if row["subject"] == subject]
    theirs, labels = requests(packaged(f"mmlu/default/mmlu_{subject}", rows))
    mine, my_labels = requests(local_task("mmlu", data))
    wanted = subject.replace("_", " ")
    chosen = [(i, c, t) for _, i, c, t in mine if f"about {wanted}." in c]
    assert chosen == [(i, c, t) for _, i, c, t in theirs]
    assert [label for label, row in zip(my_labels, ROWS["mmlu"], strict=True) if row["subject"] == subject] == labels


@torch.no_grad()
def log_likelihood(model, context, continuation):
    """By hand: the sum of log p of the continuation's tokens."""
    tokenizer = toy_tokenizer()
    tokens = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    n = len(tokenizer(context)["input_ids"])
    logs = model(tokens).logits.log_softmax(-1)[0]
    return sum(float(logs[i - 1, tokens[0, i]]) for i in range(n, tokens.shape[1]))


def test_scores_are_those_of_the_likelihoods(data, model):
    model.train()
    model.model.layers[0].eval()
    result = evaluate_tasks(model, "piqa,arc_easy", data_dir=data, tokenizer=toy_tokenizer(), batch_size=3)
    assert model.training and not model.model.layers[0].training
    model.eval()
    piqa, arc = result.scores
    for score, rows, options in (
        (piqa, ROWS["piqa"], [(r["goal"], [r["sol1"], r["sol2"]]) for r in ROWS["piqa"]]),
        (arc, ROWS["arc_easy"], [(r["question"], r["choices"]) for r in ROWS["arc_easy"]]),
    ):
        right = []
        for row, (question, choices) in zip(rows, options, strict=True):
            found = [log_likelihood(model, f"Question: {question}\nAnswer:", " " + choice) for choice in choices]
            right.append(max(range(len(found)), key=found.__getitem__) == row["label"])
        assert score.acc == sum(right) / len(right) and score.items == len(rows)
        assert score.acc_norm is not None


def test_all_tasks_run_and_the_average_is_the_papers(data, model, capsys):
    before = torch.random.get_rng_state()
    tokenizer = toy_tokenizer()
    result = evaluate_tasks(model, [*PAPER_TASKS, "lambada", "hellaswag"], data_dir=data, tokenizer=tokenizer)
    assert capsys.readouterr().err == "" and torch.equal(before, torch.random.get_rng_state())
    assert tokenizer.pad_token is None
    scores = {score.task: score for score in result.scores}
    assert set(scores) == {*PAPER_TASKS, "lambada_openai", "hellaswag"} and scores["mmlu"].items == 3
    assert result.average == pytest.approx(sum(scores[name].acc for name in PAPER_TASKS) / 6)
    assert scores["lambada_openai"].perplexity > 1 and scores["winogrande"].acc_norm is None
    assert "average of six" in str(result)
    limited = evaluate_tasks(model, "mmlu", data_dir=data, tokenizer=tokenizer, limit=1)
    assert limited.scores[0].items == 2 and limited.average is None  # one of each subject


def test_without_a_hub_its_tasks_say_what_to_give(monkeypatch):
    monkeypatch.setattr(tasks, "offline_if_silent", contextlib.nullcontext)

    def run():
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    with pytest.raises(OSError, match="cannot be had from the hub: Couldn't reach 'baber/piqa'.*--data-dir"):
        _from_hub(run)


def test_no_types_of_pyarrow_are_pickled(data, monkeypatch):
    """datasets hashes a data set by pickling all of it, which fails for some versions of Python and pyarrow."""
    import datasets.arrow_dataset

    def unpicklable(dataset):
        raise TypeError("Can't pickle <class 'MonthDayNano'>")

    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", unpicklable)
    known = {name: local_task(name, data).dataset["test"] for name in LOCAL_TASKS}
    assert {name: len(rows) for name, rows in known.items()} == {name: len(rows) for name, rows in ROWS.items()}
    same, other = known["arc_easy"]._fingerprint, known["mmlu"]._fingerprint
    assert known["arc_challenge"]._fingerprint == same != other


def test_an_items_context_is_tokenised_once():
    seen = []

    def encode(text, add_special_tokens=None):
        seen.append((text, add_special_tokens))
        return [len(text)]

    remembering = _remembering(encode)
    first = remembering("w1 w2", add_special_tokens=False)
    first.append(7)  # the caller's own
    assert remembering("w1 w2", add_special_tokens=False) == [5] and remembering("w1 w2") == [5]
    assert seen == [("w1 w2", False), ("w1 w2", None)]


def test_standard_errors():
    scores = tuple(TaskScore(name, 101, 0.5, 0.05) for name in PAPER_TASKS)
    result = TaskScores(scores, "hub", None, 1.0, {})
    assert result.average == 0.5 and result.average_stderr == pytest.approx(0.05 / 6**0.5)
    from lm_eval.api.metrics import mean_stderr

    from qprecon.llm.evaluation.scores import _stderr

    outcomes = [1] * 30 + [0] * 71
    assert _stderr(30 / 101, 101) == pytest.approx(mean_stderr(outcomes))


def test_groups_of_the_hub_count_their_subjects():
    from qprecon.llm.evaluation.scores import task_score

    results = {
        "results": {"mmlu": {"acc,none": 0.25}},
        "group_subtasks": {"mmlu": ["mmlu_stem", "mmlu_b"], "mmlu_stem": ["mmlu_a"]},
        "n-samples": {"mmlu_a": {"original": 9, "effective": 3}, "mmlu_b": {"original": 5, "effective": 5}},
    }
    assert task_score("mmlu", results).items == 8
    with pytest.raises(ValueError, match="reports no acc but f1,none"):
        task_score("other", {"results": {"other": {"f1,none": 1.0}}, "n-samples": {"other": {"effective": 3}}})


@pytest.mark.parametrize(
    ("file", "text", "culprit"),
    [
        ("piqa_valid.jsonl", '{"goal": "a", "sol1": "b", "label": 0}', "line 1: the row lacks sol2"),
        ("piqa_valid.jsonl", "{}\n[", "line 1: the row lacks goal"),
        (
            "piqa_valid.jsonl", '{"goal": "a\\ud800", "sol1": "b", "sol2": "c", "label": 0}',
            r"line 1: '.ud800' in the row is half of a character",
        ),
        ("piqa_valid.jsonl", "no", "line 1: not JSON"),
        ("piqa_valid.jsonl", "", "is empty"),
            ("piqa_valid.jsonl", "\n", "no rows"),
        ("piqa_valid.jsonl", '{"goal": 1, "sol1": "b", "sol2": "c", "label": 0}', "line 1: goal should be text, got 1"),
        ("other.jsonl", "", "none of piqa_valid.jsonl.gz"),
    ],
)
def test_a_bad_file_is_named_before_the_model_is_loaded(tmp_path, file, text, culprit):
    (tmp_path / file).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=culprit):
        evaluate_tasks("./no such model", "piqa", data_dir=tmp_path)


def files_with(tmp_path, name, change):
    """A task's file, the second row changed."""
    rows = [dict(row) for row in ROWS[name]]
    rows[1].update(change)
    rows[1] = {key: value for key, value in rows[1].items() if value is not None}
    (tmp_path / f"{LOCAL_TASKS[name].files[0]}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change", "culprit"),
    [
        ("piqa", {"label": 2}, "label is 2, none of the 2 choices: it should be 0 to 1$"),  # labels from 1
        ("piqa", {"label": -1}, "label is -1, none"),
        ("piqa", {"label": "A"}, "label is 'A', none"),  # its choices carry no letters
        ("piqa", {"label": True}, "label is True, none"),
        ("piqa", {"label": ""}, "label is '', none"),
        ("arc_easy", {"label": "F"}, "label is 'F', none of the 5 choices: it should be 0 to 4, or A to E"),
        ("arc_challenge", {"label": 1.5}, "label is 1.5, none"),
        ("openbookqa", {"choices": {"text": ["w1", "w2"]}}, "choices should be a list of texts, at least two, got {'text'"),
        ("openbookqa", {"choices": ["w1", 2]}, "choices should be a list of texts"),
        ("mmlu", {"choices": ["w1", "w2", "w3"]}, "choices should be 4 texts, got 3"),
        ("mmlu", {"label": 4}, "label is 4, none of the 4"),
        ("mmlu", {"question": None}, "the row lacks question"),
        ("winogrande", {"answer": 0}, "answer is 0, none of the 2 choices: it should be 1 to 2$"),
        ("winogrande", {"answer": ""}, "answer is '', none"),
        ("winogrande", {"sentence": "w1 w2"}, "sentence should have one gap, written _, got 'w1 w2'"),
        ("hellaswag", {"ctx": None}, "the row lacks ctx"),
        ("hellaswag", {"ctx_a": "w1"}, "the row lacks activity_label, ctx_b"),
        ("hellaswag", {"label": "2"}, "label is '2', none of the 2"),
        ("hellaswag", {"endings": ["w1"]}, "endings should be a list of texts"),
        ("piqa", {"sol2": " "}, "sol2 is empty"),
        ("arc_easy", {"choices": ["w1", "", "w2", "w3", "w4"]}, "choices is empty in place 2"),
        ("winogrande", {"option1": ""}, "option1 is empty"),
        ("winogrande", {"sentence": "w1 _ "}, "sentence should go on after its gap"),
        ("hellaswag", {"endings": ["w1", ""]}, "endings is empty in place 2"),
        ("hellaswag", {"endings": ["w1", "[step]"]}, "endings has one with nothing but"),
        ("lambada_openai", {"text": "w1"}, "text should be several words"),
        ("lambada_openai", {"text": "w1 w2\n"}, "text should be .*without white space behind it"),
        ("lambada_openai", {"text": ["w1"]}, "text should be text"),
    ],
)
def test_a_bad_row_is_named_before_the_model_is_loaded(tmp_path, monkeypatch, name, change, culprit):
    monkeypatch.setattr(assessment, "load_whole", lambda *_, **__: pytest.fail("the model was loaded"))
    files_with(tmp_path, name, change)
    with pytest.raises(ValueError, match=rf"{LOCAL_TASKS[name].files[0]}\.jsonl, line 2: {culprit}"):
        evaluate("some/model", tasks=name, task_options={"data_dir": tmp_path, "limit": 1})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("piqa", {"label": "0"}), ("arc_easy", {"label": "E"}), ("arc_easy", {"label": "4"}), ("openbookqa", {"label": "E"}),
        ("mmlu", {"label": "A"}), ("winogrande", {"answer": 1}), ("hellaswag", {"label": "0"}),
    ],
)  # fmt: skip
def test_labels_may_be_written_as_text(data, tmp_path, name, change):
    written = requests(local_task(name, files_with(tmp_path, name, change)))
    assert written == requests(local_task(name, data))


@pytest.mark.parametrize(
    ("word", "culprit"),
    [
        ("pika", r"unknown task 'pika' \(did you mean 'piqa' or 'pica'\?\)\. It is none of lm-eval's tasks"),
        ("pikachu", "unknown task 'pikachu'.* It is none of lm-eval's tasks"),
        ("ai2_arc", "'ai2_arc' is lm-eval's word for several tasks"),
    ],
)
def test_an_unknown_task_of_the_hub_is_named_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, word, culprit):
    for name in ("piqa", "pica"):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ntag: ai2_arc\n# pikachu\n")
    monkeypatch.setattr(task_names, "tasks_folder", lambda: tmp_path)
    manager = tasks_of_lm_eval(include_defaults=False, include_path=str(tmp_path))  # in place of its own thousands
    monkeypatch.setattr(tasks, "_task_manager", lambda hub: manager)
    monkeypatch.setattr(assessment, "load_whole", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=culprit):
        evaluate("some/model", tasks=f"piqa,{word}")
    assert cli.main(["eval", "some/model", "--tasks", word]) == 2 and "Traceback" not in capsys.readouterr().err
    assert tasks.check_tasks("piqa") == ["piqa"]


def test_a_name_in_none_of_its_files_is_refused_without_the_table_of_lm_eval(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "shared").write_text('"tag":\n  - some_tasks\n')
    (tmp_path / "deeper" / "two.yml").write_text('"task": "two"\n')
    (tmp_path / "one.yaml").write_text("include: deeper/shared\ngroup: one\ntask:\n  - {task: inner}\n")
    monkeypatch.setattr(task_names, "tasks_folder", lambda: tmp_path)
    monkeypatch.setattr(tasks, "_task_manager", lambda hub: pytest.fail("lm-eval's table was made"))
    assert task_names.nowhere_named(["one", "two", "inner", "some_tasks", "three", "a'b"]) == (["three"], {"one", "two"})
    with pytest.raises(ValueError, match=r"^unknown task 'twos' \(did you mean 'two'\?\)\. It is none of lm-eval's tasks"):
        tasks.check_tasks("one,twos")


def test_every_task_of_lm_eval_stands_in_its_files():
    """By its own table; of the whole, which takes it half a minute to make, the part that has groups, tags and what is included."""
    folder = task_names.tasks_folder()
    for part in ("arc", "truthfulqa-multi", "acpbench"):
        table = tasks_of_lm_eval(include_defaults=False, include_path=str(folder / part))
        assert len(table.all_tasks) > 0 and task_names.nowhere_named(table.all_tasks)[0] == [], part


@pytest.mark.parametrize("arguments, culprit", [
    ({"text": "builtin", "perplexity_options": {"seqlen": 1}}, "seqlen"),
    ({"text": "builtin", "perplexity_options": {"bos": "two"}}, "bos"),
    ({"text": "builtin", "perplexity_options": {"autocast": "int4"}}, "int4"),
    ({"text": "builtin", "batch_size": 0}, "batch_size"),
    ({"text": "builtin", "perplexity_options": {"max_windows": 0}}, "max_windows"),
    ({"tasks": "piqa", "task_options": {"limit": 0}}, "limit"),
    ({"tasks": "pika", "task_options": {"data_dir": "."}}, "did you mean 'piqa'"),
    ({"tasks": "piqa", "task_options": {"data_dir": "nowhere"}}, "nowhere"),
])  # fmt: skip
def test_bad_arguments_are_found_before_the_model_is_loaded(monkeypatch, arguments, culprit):
    monkeypatch.setattr(assessment, "load_whole", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises((ValueError, FileNotFoundError), match=culprit):
        evaluate("some/model", **arguments)


def test_unknown_tasks_and_missing_arguments(data, model, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'winogrande'"):
        tasks.check_tasks("winogrand", data_dir=data)
    assert named_tasks("lambada, piqa,piqa") == ["lambada_openai", "piqa"]
    with pytest.raises(ValueError, match="limit"):
        evaluate_tasks(model, "piqa", data_dir=data, limit=0)
    with pytest.raises(ValueError, match="tokenizer"):
        evaluate_tasks(model, "piqa", data_dir=data)
    with pytest.raises(TypeError, match="^tokenizer must be a transformers tokenizer, .* got 'gpt2'$"):
        evaluate_tasks(model, "piqa", data_dir=data, tokenizer="gpt2")
    with pytest.raises(ValueError, match=r"pass model\.module"):
        evaluate_tasks(torch.nn.DataParallel(model), "piqa", data_dir=data, tokenizer=toy_tokenizer())
    with pytest.raises(ValueError, match="--text, --tasks"):
        evaluate(tmp_path)


def test_the_command_measures_and_keeps_results_beside_the_model(data, model, tmp_path, capsys):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(200)))
    line = ["eval", str(folder), "--text", str(text), "--seqlen", "32", "--tasks", "piqa,openbookqa", "--data-dir", str(data)]
    assert cli.main([*line, "--quiet", "--device", "cpu", "--save"]) == 0
    assert "openbookqa" in capsys.readouterr().out
    for _ in range(2):  # the second time replaces the first
        assert cli.main([*line, "--quiet", "--device", "cpu", "--save", "--json", "--limit", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    saved = json.loads((folder / EVALUATION_NAME).read_text())
    assert [row["task"] for row in saved["tasks"]] == ["piqa", "openbookqa"] * 2
    assert [row["limit"] for row in saved["tasks"]] == [None, None, 1, 1]
    assert len(saved["perplexity"]) == 1 and saved["perplexity"][0]["value"] == result["perplexity"]["value"]
    assert result["tasks"]["scores"][0]["items"] == 1


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
num_fewshot: 2
output_type: multiple_choice
doc_to_text: "{{{{goal}}}}"
doc_to_choice: "{{{{[sol1, sol2]}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GROUP = "group: {name}\ntask: [{tasks}]\naggregate_metric_list: [{{metric: acc, weight_by_size: true}}]\n"


def test_groups_have_the_scores_that_simple_evaluate_gives(model, tmp_path, monkeypatch):
    """That is lm-eval's usual way in; here its parts are called, and without examples whatever a task asks for."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    rows = [json.dumps(row) for row in ROWS["piqa"]]
    for name, own in (("one", rows), ("two", rows[:1]), ("three", rows[1:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(own))
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, file=tmp_path / f"{name}.jsonl"))
    (tmp_path / "inner.yaml").write_text(GROUP.format(name="inner", tasks="two, three"))
    (tmp_path / "outer.yaml").write_text(GROUP.format(name="outer", tasks="one, inner"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    manager = tasks_of_lm_eval(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(tasks, "_task_manager", lambda hub: manager)
    found = tasks._run(model, toy_tokenizer(), ["outer"], None, 2, False)
    expected = simple_evaluate(
        HFLM(pretrained=model, tokenizer=toy_tokenizer()), tasks=["outer"], num_fewshot=0, bootstrap_iters=0, log_samples=False,
        task_manager=manager,
    )
    for part in ("results", "n-samples", "group_subtasks", "n-shot"):
        assert found[part] == expected[part], part
    assert set(found["n-shot"].values()) == {0}
    assert task_score("outer", found).items == 2 * len(rows)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_has_nothing_to_say_outside_a_checkout(data, model, tmp_path, monkeypatch, capfd):
    from lm_eval import evaluator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("LC_ALL", "C")
    evaluator.get_git_commit_hash()
    assert "not a git repository" in capfd.readouterr().err  # of a child process: what this test would see
    evaluate_tasks(model, "piqa", data_dir=data, tokenizer=toy_tokenizer(), limit=1)
    assert "git" not in capfd.readouterr().err


def test_results_under_other_conditions_stay(tmp_path):
    from qprecon.llm.evaluation.perplexities import PerplexityResult

    base = dict(windows=2, targets=2, tokens_read=9, seqlen=8, bos="none", text="a", seconds=1.0)
    for value, text in ((3.0, "a"), (4.0, "b"), (5.0, "a")):
        _add(tmp_path / "e.json", Evaluation(PerplexityResult(value=value, **{**base, "text": text}), None))
    rows = json.loads((tmp_path / "e.json").read_text())["perplexity"]
    assert [(row["text"], row["value"]) for row in rows] == [("b", 4.0), ("a", 5.0)]
