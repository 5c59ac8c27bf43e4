"""The task that lm-eval is given says where its answers are, and the plans' exit statuses are looked at."""

import json
import subprocess

import pytest
import yaml

from scripts.serving import clients, plans


def test_the_answers_of_the_task_are_where_it_says(tmp_path):
    questions = [json.loads(line) for line in clients.write_task(tmp_path).read_text().splitlines()]
    right = {question: answer for question, answer, *_ in clients._FACTS}
    assert {one["question"]: one["choices"][one["answer"]] for one in questions} == right
    assert {one["answer"] for one in questions} == {0, 1, 2, 3}
    assert all(len(set(one["choices"])) == 4 for one in questions)
    task = yaml.safe_load((tmp_path / "local_qa.yaml").read_text())
    assert (task["output_type"], task["doc_to_target"]) == ("multiple_choice", "answer")


def test_a_plan_that_contradicts_its_exit_status_is_no_plan(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout='{"fits": false}', stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="status 0, and the plan says fits=False"):
        plans.plan("m", "v5e-1")
    done.returncode, done.stderr = 1, "no such model"
    with pytest.raises(RuntimeError, match="ended with status 1: no such model"):
        plans.plan("m", "v5e-1")
