"""Images over real sockets: to the server with their item, back as digests, to each rank once an item."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pyarrow.parquet as pq
import pytest

from buffer import inspect
from buffer.problems import Problems, load_problems
from buffer.store.sqlite import Store
from buffer.wire import status
from buffer.wire.batches import AWAY_S, parts
from buffer.wire.client import RefusedError
from buffer.wire.handlers import HOLD_S
from buffer.wire.protocol import Part, Put, RowImages, State, Status, Stored, Take
from buffer.wire.sample import Sample, SampleImage, sample_stats
from configs.schema import DataConfig
from tests.buffer.test_image_rows import JPEG, PNG, write
from tests.harness.buffer_process import (
    buffer,
    client,
    group,
    in_loop,
    make_requests,
    process,
    rollout,
    sample,
)

DIGEST = "0123456789abcdef" * 4
ROW, OWN = SampleImage(start=0, digest=DIGEST), SampleImage(start=2, digest=DIGEST, data=JPEG)


def with_images(one: Sample, *images: SampleImage) -> Sample:
    return Sample(**{name: getattr(one, name) for name in Sample.model_fields} | {"images": list(images)})


def load(folder: Path, rows: int = 4) -> Problems:
    """Even rows have an image."""
    (folder / "a.png").write_bytes(PNG)
    made = [{"problem": f"{row}<image>" if row % 2 == 0 else f"{row}", "answer": ""} for row in range(rows)]
    shown = [row | {"images": ["a.png"] if "<image>" in row["problem"] else []} for row in made]
    path = write(folder, "jsonl", shown)
    return load_problems(path, DataConfig(train=path))


def test_a_sample_with_images_comes_back_as_it_was():
    """Its own in a second turn: a given token again."""
    turns = sample(tokens=6)
    made = with_images(turns, ROW, OWN)
    read = Sample.unpack(made.pack())
    assert read == made and read.images == [ROW, OWN]
    stats, plain = sample_stats(made.pack()), sample_stats(turns.pack())
    assert stats == plain and (stats.row_images, plain.row_images) == (1, 0)
    assert msgpack.unpackb(turns.pack())["images"] == []


@pytest.mark.parametrize(
    "images",
    [
        [SampleImage(start=6, digest=DIGEST)],
        [SampleImage(start=4, digest=DIGEST)],
        [OWN, ROW],
        [ROW, ROW],
    ],
    ids=["behind the end", "where tokens were sampled", "out of order", "twice at one place"],
)
def test_images_stand_in_order_among_given_tokens(images):
    fields = sample(tokens=6).model_dump() | {"images": [image.model_dump() for image in images]}
    with pytest.raises(ValueError, match=r"image \d at token \d: images stand in order, among the 6 tokens"):
        sample_stats(msgpack.packb(fields))


@pytest.mark.parametrize("broken", [{"start": -1}, {"digest": "x"}, {"data": "text"}, {"more": 1}])
def test_an_image_of_another_shape_is_refused_in_one_line(broken):
    fields = sample(tokens=6).model_dump() | {"images": [ROW.model_dump() | broken]}
    with pytest.raises(ValueError, match=r"^images\.0\.") as error:
        sample_stats(msgpack.packb(fields))
    assert "\n" not in str(error.value)


def test_a_part_has_the_images_of_its_items_once():
    packed = [(item, 0, [s.pack() for s in group(item, samples=4)]) for item in (3, 1, 2)]
    groups = [(item, d, [(data, sample_stats(data)) for data in group_]) for item, d, group_ in packed]
    images = {item: RowImages(item=item, images=[PNG, JPEG]) for item in (1, 3)}
    for world in (1, 2, 5):
        for part in parts(0, world, groups, images=images):
            items = {int(part.rows.item.numpy()[position]) for position in part.positions.numpy()}
            assert [row.item for row in part.images] == sorted(items & {1, 3})


@in_loop
async def test_images_go_out_with_their_item_and_to_each_rank_that_trains_it(tmp_path: Path) -> None:
    async with buffer(make_requests(problems=load(tmp_path))) as it, rollout(it.address) as server:
        items = await server.ask(2)
        assert items and [item.problem.get("images") for item in items] == [[PNG], None]
        assert items[1].problem == {"problem": "1", "answer": ""}
        await server.put(items[0], [with_images(one, ROW, OWN) for one in group(0, tokens=6)])
        await server.put(items[1], group(1))
        async with client(it.address, "learner-0", "learner") as learner:
            for rank in range(2):
                part = await learner.expect(Take(version=0, rank=rank, world=2), Part)
                assert part.images == [RowImages(item=0, images=[PNG])]
                assert [Sample.unpack(data).images for data in part.samples] == [[ROW, OWN], []]


@in_loop
async def test_a_sample_with_more_images_than_its_row_is_refused(tmp_path: Path) -> None:
    async with buffer(make_requests(problems=load(tmp_path))) as it, rollout(it.address) as server:
        items = await server.ask(2)
        assert items
        second = SampleImage(start=1, digest=DIGEST)
        for item, shown, has in ((items[0], [ROW, second], 1), (items[1], [ROW], 0)):
            samples = [with_images(one, *shown).pack() for one in group(item.item, tokens=6)]
            answer = await server.client.expect(Put(item=item.item, lease=item.lease, samples=samples), Stored)
            assert answer.unfit and f"{len(shown)} images of row {item.item}, which has {has}" in answer.reason
        again = {item.item: item for item in await server.ask(2) or []}
        await server.put(again[0], [with_images(one, ROW) for one in group(0, tokens=6)])


@in_loop
async def test_an_item_whose_image_is_gone_fails_by_name_and_others_go_out(tmp_path: Path) -> None:
    problems = load(tmp_path, 3)
    (tmp_path / "a.png").unlink()
    requests = make_requests(problems=problems, attempts=1, epochs=1)
    async with buffer(requests) as it, rollout(it.address) as server:
        (only,) = await server.ask(1) or []
        assert only.problem["problem"] == "1"
        assert (await server.put(only, group(1))).accepted
        asking = asyncio.create_task(server.ask(3))
        async with client(it.address, "learner-0", "learner") as learner:
            assert len((await learner.expect(Take(version=0, rank=0, world=1), Part)).samples) == 2
        assert await asking is None, "row 2 failed too, and that is all"
        state = status.state(requests.handlers, [], 0, 0.0)
    (reason,) = {name.partition(": ")[2] for name in state.failed if "row 0" in name}
    assert reason.startswith(f"row 0: {tmp_path}/a.png: No such file or directory")
    assert sum(state.dropped.values()) == 2


@in_loop
async def test_a_batch_waits_for_an_image_that_went_after_it_was_dispatched(tmp_path: Path) -> None:
    async with buffer(requests := make_requests(problems=load(tmp_path))) as it, rollout(it.address) as server:
        for item in await server.ask(2) or []:
            await server.put(item, group(item.item))
        (away := tmp_path / "a.png").rename(tmp_path / "b.png")
        async with client(it.address, "learner-0", "learner") as learner:
            take = Take(version=0, rank=0, world=1)
            with pytest.raises(RefusedError, match=r"item 0, row 0: .*a\.png.*bring the image back, and start"):
                await learner.expect(take, Part)
            (tmp_path / "b.png").rename(away)
            part = await learner.expect(take, Part)
            assert len(part.samples) == 4 and part.images == [RowImages(item=0, images=[PNG])]
        assert requests.handlers.ledger.state.version == 1


@contextmanager
def share_away(folder: Path) -> Iterator[None]:
    """Reading the image fails as on a file share that is away: a socket is in its place."""
    image, kept = folder / "a.png", folder / "kept.png"
    image.rename(kept)
    with socket.socket(socket.AF_UNIX) as away:
        away.bind(str(image))
        yield
    kept.replace(image)


@in_loop
async def test_while_a_file_share_is_away_rows_are_given_back_and_cost_no_attempt(tmp_path: Path) -> None:
    requests = make_requests(problems=load(tmp_path), attempts=1, epochs=1)
    handlers = requests.handlers
    async with buffer(requests) as it, rollout(it.address) as server:
        with share_away(tmp_path):
            assert [item.item for item in await server.ask(2) or []] == [1], "row 0 waits, another one goes out"
            assert [item.item for item in await server.ask(2) or []] == [3]
            asking = asyncio.create_task(server.ask(2))
            await asyncio.sleep(HOLD_S + 1.5 * AWAY_S)
            assert not asking.done()
            async with client(it.address, "watcher", "observer") as observer:
                (waiter,) = (await observer.expect(Status(), State)).waiters
            assert re.match("1 item waits because its images|2 items wait because their images|images ", waiter.why)
            tries = handlers.ledger.state.next_lease
            assert tries < 12, "it waits between its tries"
        found = [item.item for item in await asking or []]
        while len(found) < 2:  # each is held from its own last try on
            found += [item.item for item in await server.ask(2) or []]
        assert sorted(found) == [0, 2]
        assert not handlers.ledger.view.failed() and not handlers.ledger.view.dropped()


@in_loop
async def test_while_all_images_are_away_nothing_spins(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = write(tmp_path, "jsonl", [{"problem": "<image>", "answer": "", "images": ["a.png"]}] * 1000)
    requests = make_requests(problems=load_problems(path, DataConfig(train=path)), attempts=1)
    async with buffer(requests) as it, rollout(it.address) as server:
        with share_away(tmp_path):
            asking = asyncio.create_task(server.ask(1))
            await asyncio.sleep(3.5 * AWAY_S)
            assert not asking.done() and requests.handlers.ledger.state.next_item < 10
        assert [item.item for item in await asking or []] == [0], "in the order of the epoch"


@in_loop
async def test_a_batch_waits_while_a_file_share_is_away(tmp_path: Path) -> None:
    async with buffer(requests := make_requests(problems=load(tmp_path))) as it, rollout(it.address) as server:
        for item in await server.ask(2) or []:
            await server.put(item, group(item.item))
        async with client(it.address, "learner-0", "learner") as learner:
            with share_away(tmp_path):
                taking = asyncio.create_task(learner.expect(Take(version=0, rank=0, world=1), Part))
                await asyncio.sleep(1.5 * AWAY_S)
                assert not taking.done() and requests.handlers.groups.learner_waiting
            part = await taking
            assert len(part.samples) == 4 and part.images == [RowImages(item=0, images=[PNG])]


@in_loop
async def test_a_stored_problem_has_its_images_in_words(tmp_path: Path) -> None:
    problems = load(tmp_path)
    path = tmp_path / "buffer.sqlite"
    store = Store(path, fsync=False, problems=problems, digest=problems.digest)
    async with buffer(make_requests(store=store, problems=problems)) as it, rollout(it.address) as server:
        (item,) = await server.ask(1) or []
        (tmp_path / "a.png").unlink()
        await server.put(item, [with_images(one, ROW, OWN) for one in group(0, tokens=6)])
    db = inspect.reading(path)
    shown = "\n".join(map(str, inspect.show(db, 0)))
    assert f'"images": "1 image: {len(PNG):,} bytes of {tmp_path}/a.png"' in shown
    assert f"at token 0: image 0 of its row, pixels {DIGEST[:12]}" in shown
    assert f"at token 2: {len(JPEG):,} bytes of its task, pixels {DIGEST[:12]}" in shown
    assert list(inspect.export(db, tmp_path / "all.parquet")) == [f"{tmp_path}/all.parquet: 2 samples"]
    db.close()
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert rows[0]["images"] == [ROW.model_dump(), OWN.model_dump()]


def test_a_buffer_refuses_images_for_a_text_model_by_the_keys(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    data = tmp_path / "data"
    data.mkdir()
    load(data)
    settings = {"data.train": data / "train.jsonl", "model.path": model}
    with process(tmp_path, **settings) as it:
        assert it.running
        errors = it.running.communicate(timeout=120)[1]
        code, it.running = it.running.returncode, None
    assert code == 2 and "2 rows have images, but model.path" in errors and "is a text model" in errors
    assert "Traceback" not in errors
