"""The benchmark of the time outside forwards, run on the embedded target: what it counts."""

import json

import outside


def test_shares_of_a_step(tmp_path, capsys):
    found = tmp_path / "found.json"
    choice = ["--kinds", "greedy,seeded,json", "--batches", "2", "--contexts", "100"]
    size = ["--tokens", "24", "--warm", "2"]
    outside.main([*choice, *size, "--drafts", "none,ngram", "--json", str(found)])
    rows = json.loads(found.read_text(encoding="utf-8"))
    cells = [(row["draft"], row["kind"]) for row in rows]
    assert cells == [(d, k) for d in ("none", "ngram") for k in ("greedy", "seeded", "json")]
    assert capsys.readouterr().out.count(" outside ") == len(rows)
    for row in rows:
        assert row["steps"] >= 2 and 0 < row["outside"] < 1
        assert row["parts"]["verifier"] > 0 and "forward" not in row["parts"]
        assert sum(row["parts"].values()) < 1
    # Of 24: neither those that read a prompt (the second waits for the first), nor the last, nor
    # the two that warm up.
    assert rows[0]["steps"] == 19


def test_prompts_share_their_beginning_and_differ_at_the_end():
    def tokenizer(text):
        return {"input_ids": [ord(letter) for letter in text]}

    prompts = outside.prompts_of(tokenizer, 100, 3, tmp_folder := outside.Path("nowhere"))
    assert not tmp_folder.exists()
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:68]) for prompt in prompts}) == 1
    assert len({tuple(prompt[68:]) for prompt in prompts}) == 3
