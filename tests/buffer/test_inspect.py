"""`python -m buffer tail|show|export`, of a live run and of a dead one, and what a live one says of itself."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import closing

import numpy as np
import pyarrow.parquet as pq
import pytest

from buffer import inspect
from buffer.ledger.rules import Ledger
from buffer.ledger.types import LedgerError, SampleStats, Transaction
from buffer.store.sqlite import Store, reading
from buffer.wire.client import RefusedError, RolloutClient
from buffer.wire.protocol import Ack, Part, Quarantine, Rewind, Rewound, State, Status, Take, Trained
from configs.load import load
from configs.resume import fingerprint
from configs.writing import WriteError, draft_of
from examples.countdown.make_model import make_tokenizer
from tests.harness.buffer_process import Process, client, group, process
from tests.harness.chatml import ANSWER, CALLS, CHATML, HEAD, TOOL, episode


@pytest.fixture
def traffic(tmp_path):
    """A live run: batch 0 of items 0 to 3, item 4 stored, item 5 dropped, item 6 leased, a learner that waits."""
    with process(tmp_path, **{"rollout.heartbeat_s": 60}) as it:  # no lease ends, however slow the machine is
        print_ = fingerprint(load(it.arguments()[3:]))

        async def make() -> None:
            async with client(it.address, fingerprint=print_) as server:
                samples = RolloutClient(server, lambda: 0)
                items = await samples.ask(7)
                for item in items[:5]:
                    await samples.put(item, group(item.item, tokens=6))
                await samples.fail(items[5], "prompt too long", permanent=True, kind="prompt")
                async with client(it.address, "learner-0", "learner", fingerprint=print_) as learner:
                    await learner.expect(Take(version=0, rank=0, world=1), Part)
                    waiting = asyncio.create_task(learner.expect(Take(version=1, rank=0, world=1), Part))
                    await asyncio.sleep(0.1)
                    async with client(it.address, "status", "observer", fingerprint="") as observer:
                        states.append(await observer.expect(Status(), State))
                    waiting.cancel()
                    await asyncio.wait({waiting})

        states: list[State] = []
        asyncio.run(make())
        yield it, states[0]


def test_the_state_of_a_live_run_has_its_figures(traffic):
    _, state = traffic
    assert state.counts == dict(leased=1, stored=1, waiting=0, batched=4, trained=0, dropped=1)
    assert state.dropped == {"prompt too long": 1} and state.failed == {"prompt: prompt too long": 1}
    assert state.ages == {0: 4} and state.servers["rollout-0"]["leases"] == 1
    assert state.lengths == {"generated": [5, 10, 65, 35, 0], "dropped: prompt too long": [1, 0, 0, 0, 0]}
    (waiter,) = state.waiters
    assert (waiter.who, waiter.kind) == ("learner-0", "Take") and "batch 1 has 1 of 4 groups" in waiter.why
    assert "failed" not in waiter.why, "not since the last batch"


def test_stats_is_the_status_of_the_actors(tmp_path):
    command = [*Process(tmp_path).arguments()[:3], "stats", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 2 and done.stdout == ""
    assert "`python -m actors status RUN`" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_tail_show_and_export_of_a_dead_run_from_folder_or_config(traffic, capsys, tmp_path):
    it, _ = traffic
    it.kill()
    assert inspect.main(["tail", "-n", "2", str(it.run)]) == 0
    tail = capsys.readouterr().out.splitlines()
    assert len(tail) == 2
    assert "item 3 batched in batch 0" in tail[0] and "item 4 stored" in tail[1] and "rewards 0.0 1.0" in tail[1]

    assert inspect.main(["show", "4", str(it.folder / "run.yaml"), "--tokens"]) == 0
    shown = capsys.readouterr().out
    for expected in ("problem 4", "state        stored", "answer 4", "reward 1, stop, 7 tokens", "-0.5000", "given"):
        assert expected in shown
    assert inspect.main(["show", "4", str(it.run), "--sample", "1"]) == 0
    shown = capsys.readouterr().out
    assert "sample 1 " in shown and "sample 0" not in shown and "-0.5000" not in shown
    assert "assistant turn 1: 4 tokens, trained, version 0, mean log-probability -0.50" in shown
    assert inspect.main(["show", "4", str(it.run), "--sample", "2"]) == 2
    assert "--sample 2: item 4 has the samples 0, 1" in capsys.readouterr().err
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert (
        inspect.main(["show", "4", str(it.folder / "run.yaml"), f"--model.path={tmp_path / 'model'}", "--tokens"]) == 0
    )
    token = make_tokenizer().decode([int(group(4, tokens=6)[0].tokens.numpy()[-1])])
    assert f'  "{token}"' in capsys.readouterr().out
    assert inspect.main(["show", "5", str(it.run)]) == 0
    dropped = capsys.readouterr().out
    assert "state        dropped" in dropped and "reason       prompt too long" in dropped
    assert inspect.main(["show", "99", str(it.run)]) == 2
    assert "item 99" in capsys.readouterr().err

    out = tmp_path / "samples.parquet"
    assert inspect.main(["export", str(out), str(it.run)]) == 0
    draft_of(tmp_path / "full.parquet").symlink_to("/dev/full")
    assert inspect.main(["export", str(tmp_path / "full.parquet"), str(it.run)]) == 1, "the input was not bad"
    rows = pq.read_table(out).to_pylist()
    assert [(row["item"], row["index"]) for row in rows] == [(item, index) for item in range(5) for index in range(2)]
    first = group(0, tokens=6)[0]
    for name in ("tokens", "sampled", "versions", "behaviour_logprobs"):
        np.testing.assert_array_equal(rows[0][name], getattr(first, name).numpy())
    assert (rows[1]["reward"], rows[1]["batch"], rows[1]["answer"]) == (1.0, 0, "answer 0")
    assert json.loads(rows[8]["problem"])["answer"] == "4"
    assert (rows[8]["state"], rows[8]["batch"]) == ("stored", -1)
    assert (rows[0]["starts"], rows[0]["turn_rewards"]) == ([0], [])
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_export_says_how_many_samples_were_removed_with_older_checkpoints(tmp_path):
    with Store(tmp_path / "buffer.sqlite", fsync=False) as store:
        ledger = Ledger(8, 2, 0, shuffle=False)
        for version in range(2):
            payloads = {}
            for it in ledger.ask("s#1", version, 2, 0.0, version + 1):
                payloads[it.item] = [one.pack() for one in group(it.item, version)]
                ledger.put("s#1", it.item, it.lease, (SampleStats(4, 2, 0.0), SampleStats(5, 3, 1.0)), 0.0)
            ledger.batches.take(version)
            ledger.batches.trained(version)
            store.commit(Transaction(ledger.drain(), payloads, void_before=version))
    with closing(reading(tmp_path / "buffer.sqlite")) as db:
        (line,) = inspect.export(db, tmp_path / "out.parquet")
    removed = "4 others were removed with older checkpoints, which buffer.keep: all would keep"
    assert line == f"{tmp_path}/out.parquet: 4 samples; {removed}"
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 4


def test_export_replaces_no_folder_and_no_device(tmp_path):
    """As root it once put a parquet file in the place of /dev/full."""
    with Store(tmp_path / "buffer.sqlite", fsync=False):
        pass
    os.mkfifo(tmp_path / "pipe")
    places = {"pipe": "no regular file; name another", ".": "a folder; name a file in it", "none/out": "make it first"}
    with closing(reading(tmp_path / "buffer.sqlite")) as db:
        for place, why in places.items():
            with pytest.raises(LedgerError, match=why):
                list(inspect.export(db, tmp_path / place))
    assert (tmp_path / "pipe").is_fifo()


def test_an_export_that_fills_the_disk_names_its_file_and_leaves_none(tmp_path):
    with Store(tmp_path / "buffer.sqlite", fsync=False):
        pass
    draft_of(tmp_path / "out.parquet").symlink_to("/dev/full")
    with closing(reading(tmp_path / "buffer.sqlite")) as db, pytest.raises(WriteError) as error:
        list(inspect.export(db, tmp_path / "out.parquet"))
    assert str(error.value) == f"{tmp_path}/out.parquet: No space left on device; make room on its disk"
    assert not [*tmp_path.glob("*out.parquet*")]


def test_show_reads_an_episode_of_two_segments(tmp_path, capsys):
    """Its client has taken the thinking out of the history: the second segment gives what the first one sampled."""
    short = CALLS[CALLS.index("<tool_call>") :]
    made = episode([(HEAD, 0), (CALLS, 1)], [(HEAD + short + TOOL, 0), (ANSWER, 2)], rewards=[0.25, 0.5])
    CHATML.save(str(tmp_path / "tokenizer.json"))
    with process(tmp_path, **{"rollout.heartbeat_s": 60, "model.path": str(tmp_path)}) as it:
        run_file = it.arguments()[3:]

        async def put() -> None:
            print_ = fingerprint(load(run_file))
            async with (
                client(it.address, "learner-0", "learner", fingerprint=print_) as learner,
                client(it.address, fingerprint=print_) as server,
            ):
                await learner.expect(Rewind(version=2), Rewound)
                samples = RolloutClient(server, lambda: 1)
                asked = await samples.ask(1)
                assert asked is not None
                await samples.put(asked[0], [made, made.model_copy(update={"turn_rewards": []})])

        asyncio.run(put())
        it.kill()
    assert inspect.main(["show", "0", *run_file]) == 0
    first, second = capsys.readouterr().out.split("sample 1 ")
    known = "reward 0.75, stop, 308 tokens in 2 turns and 2 segments"
    assert known in second and ", reward 0." not in second, "no rewards of turns"
    assert [line.strip() for line in first[first.index("sample 0 ") :].splitlines()] == [
        f"sample 0     {known}",
        "segment 1 of 2: 147 tokens",
        "system: 24 tokens, given",
        "You are terse.",
        "user: 22 tokens, given",
        "What is 17*23?",
        "assistant turn 1: 90 tokens, trained, version 1, mean log-probability -0.25, reward 0.25, calls multiply",
        *CALLS.splitlines(),
        "segment 2 of 2: 161 tokens",
        "begins as segment 1 does: 2 messages, 46 tokens, given",
        "assistant: 82 tokens, given",
        *short.removesuffix("<|im_end|>").splitlines(),
        "tool: 11 tokens, given",
        "391",
        "assistant turn 2: 11 tokens, trained, version 2, mean log-probability -0.25, reward 0.5",
        "It is 391.<|im_end|>",
        "",
    ]


def test_quarantine_lists_the_groups_with_what_they_say(tmp_path, capsys):
    CHATML.save(str(tmp_path / "tokenizer.json"))
    with process(tmp_path, **{"rollout.heartbeat_s": 60, "model.path": str(tmp_path)}) as it:
        run_file = it.arguments()[3:]

        async def put() -> None:
            print_ = fingerprint(load(run_file))
            async with (
                client(it.address, "learner-0", "learner", fingerprint=print_) as learner,
                client(it.address, fingerprint=print_) as server,
            ):
                samples = RolloutClient(server, lambda: 0)
                for item in await samples.ask(4):
                    await samples.put(item, group(item.item, tokens=6))
                await learner.expect(Take(version=0, rank=0, world=1), Part)
                with pytest.raises(RefusedError, match="Quarantine is a request of the learner"):
                    await server.expect(Quarantine(item=2, reason="mine"), Ack)
                await learner.expect(Quarantine(item=2, reason="sample 4 of batch 0: tokens: -5"), Ack)
                assert len((await learner.expect(Take(version=0, rank=0, world=1), Part)).samples) == 6
                await learner.expect(Trained(version=0, oldest_kept=1), Ack)
                with pytest.raises(RefusedError, match="item 1 is not known here"):
                    await learner.expect(Quarantine(item=1, reason="too late"), Ack)

        asyncio.run(put())
        assert inspect.main(["quarantine", *run_file]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "item 2, row 2 of data.train, epoch 0: sample 4 of batch 0: tokens: -5"
        assert lines[1].startswith("    dispatched at version 0 to rollout-0; out of batch 0 at 20")
        text = CHATML.decode([0, 1, 2, 3, 4, 2], skip_special_tokens=False)
        assert lines[2].startswith("    sample 0, ") and lines[2].endswith(f"reward 0, stop, 6 tokens: {text!r}")
        assert lines[3].startswith("    sample 1, ") and len(lines) == 4
        _, errors = it.kill()
        assert "item 2 (row 2) is in quarantine and is not trained: sample 4 of batch 0: tokens: -5" in errors


def test_help_names_the_commands():
    done = subprocess.run([sys.executable, "-m", "buffer", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    for command in ("stats", "tail", "show", "export", "quarantine", "keys"):
        assert f"\n  {command} " in done.stdout


def test_tail_follows_a_live_run(traffic):
    it, _ = traffic
    command = [it.arguments()[0], "-m", "buffer", "tail", "-n", "1", "--follow", str(it.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert "item 4 stored" in following.stdout.readline()

        async def deliver() -> None:
            print_ = fingerprint(load(it.arguments()[3:]))
            async with client(it.address, "rollout-1", fingerprint=print_) as server:
                samples = RolloutClient(server, lambda: 1)
                await samples.beat({})
                for item in await samples.ask(2):
                    await samples.put(item, group(item.item, item.version))

        asyncio.run(deliver())
        came = [following.stdout.readline() for _ in range(2)]
        following.send_signal(signal.SIGINT)
    assert all(" stored" in line and "to rollout-1" in line for line in came) and came[0] != came[1]
    assert following.returncode == 130


@pytest.mark.parametrize("number", ["9" * 20, "-1", "four", "1_0", "1e3", ""])
def test_a_number_that_cannot_be_is_refused(number, capsys):
    for words in (["show", number], ["show", "4", "--sample", number], ["tail", "-n", number]):
        with pytest.raises(SystemExit) as ended:
            inspect.main([*words, "run"])
        assert ended.value.code == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert "is not a whole number of at most 18 digits" in line or "expected one argument" in line


def test_a_model_whose_folder_is_elsewhere_is_named_with_the_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in ("runs/toy/model", "model", "Some/Model"):
        assert inspect.tokenizer_of(model) is None
        expected = f"no text of the tokens: {model}/tokenizer.json: no such file (from {tmp_path}); "
        assert capsys.readouterr().err == f"{expected}name its folder by --model.path\n"


def test_a_run_that_is_not_there_is_told_in_one_line(tmp_path, capsys):
    it = Process(tmp_path)
    assert inspect.main(["tail", str(it.config())]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
