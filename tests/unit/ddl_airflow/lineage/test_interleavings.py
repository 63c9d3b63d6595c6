"""What a reader of a pointer can see, in every order in which others may be stopped or overtaken.

Each who changes something in the store is one actor. One of them is interrupted at each of its
store operations in turn: killed before or after it, given an error, or overtaken by another one
there, which is itself killed at each of its operations. After every single operation of anybody a
reader follows the pointers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from ddl_airflow.core.errors import NoSuchModel, SourceMissing, StagingError
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point, promote, rollback
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.store import StoredObject

RECORD = {
    "dataset": {"fingerprint": "d"},
    "code": {"digest": "c"},
    "manifest": {"digest": "m"},
    "run": {"dag_id": "digits", "parameters": {}},
    "result": {"metrics": {}},
}


class Killed(BaseException):
    """SIGKILL: nothing that the process still tries has an effect."""


class World:
    """The objects, and the reader, who looks after each operation."""

    def __init__(self, objects=()):
        self.objects = dict(objects)
        self.looks = 0

    def look(self):
        """The pointers name whole models, of which each file is the one that was published."""
        self.looks += 1
        for name in (LATEST, PRODUCTION):
            pointer = self.objects.get(f"digits/{name}.json")
            if pointer is None:
                continue
            named = json.loads(pointer)
            marker = json.loads(self.objects[f"{named['publication']}/_SUCCESS"])
            assert marker["training_id"] == named["training_id"]
            for file in marker["files"]:
                body = self.objects[f"{named['publication']}/{file['key']}"]
                assert hashlib.sha256(body).hexdigest() == file["sha256"], named["publication"]


class Actor:
    """A process, and what happens to it at one of its operations.

    Args:
        at: number of the operation; None: never.
        what: "killed before" or "after" it, "fails", "overtaken", "no answer": it is done, and the
            one who asked for it is told that it is not; or "answered late": it is done, somebody
            else comes and goes, and the one who asked gets an error.
        by: runs when it is overtaken, or answered late.
    """

    def __init__(self, world, at=None, what="", by=None):
        self.world, self.at, self.what, self.by = world, at, what, by
        self.count, self.dead = 0, False

    def does(self, operation):
        if self.dead:
            raise Killed
        number, self.count = self.count, self.count + 1
        here = number == self.at
        if here and self.what == "killed before":
            self.dead = True
            raise Killed
        if here and self.what == "fails":
            raise StagingError("the store is away")
        if here and self.what == "overtaken":
            self.by()
        answer = operation()
        self.world.look()
        if here and self.what == "killed after":
            self.dead = True
            raise Killed
        if here and self.what == "answered late":
            self.by()
            raise StagingError("the answer was lost")
        return False if here and self.what == "no answer" and answer is True else answer


class WatchedStore:
    """One actor's view of the objects."""

    def __init__(self, actor, prefix=""):
        self.actor, self.prefix = actor, prefix.strip("/")
        self.uri = f"memory://all/{self.prefix}".rstrip("/")
        self.resumes = False

    def _key(self, key):
        return f"{self.prefix}/{key}".strip("/")

    def _etag(self, body):
        return hashlib.md5(body).hexdigest()

    def _store(self, key, body):
        self.actor.world.objects[self._key(key)] = body
        return StoredObject(key, len(body), self._etag(body))

    def at(self, prefix):
        return WatchedStore(self.actor, f"{self.prefix}/{prefix}")

    def list(self):
        start = self._key("") + "/" if self.prefix else ""
        return self.actor.does(
            lambda: sorted(
                StoredObject(key[len(start) :], len(body), self._etag(body))
                for key, body in self.actor.world.objects.items()
                if key.startswith(start)
            )
        )

    def put(self, path, key, sha256, advance, left=()):
        return self.actor.does(lambda: self._store(key, path.read_bytes()))

    def put_bytes(self, key, body):
        return self.actor.does(lambda: self._store(key, body))

    def _read(self, key):
        return self.actor.does(lambda: self.actor.world.objects.get(self._key(key)))

    def read_bytes(self, key):
        if (body := self._read(key)) is None:
            raise SourceMissing(key)
        return body

    def exists(self, key):
        return self._read(key) is not None

    def read_version(self, key):
        body = self._read(key)
        return None if body is None else (body, self._etag(body))

    def put_if(self, key, body, version):
        def replace():
            now = self.actor.world.objects.get(self._key(key))
            if (now and self._etag(now)) != version:
                return False
            self._store(key, body)
            return True

        return self.actor.does(replace)

    def delete(self, keys):
        for key in keys:
            self.actor.does(lambda key=key: self.actor.world.objects.pop(self._key(key), None))


@pytest.fixture
def upload(tmp_path):
    """upload(training, content, model="") -> what an upload does with a store."""

    def of(training, content, model=""):
        files = {}
        for key in ("model/saved_model.pb", "lineage.json"):
            files[key] = tmp_path / training / content / key
            files[key].parent.mkdir(parents=True, exist_ok=True)
            files[key].write_text(json.dumps(RECORD | {"of": [training, content, key]}))
        if model:
            files["model/saved_model.pb"].write_text(model)

        def run(store):
            done = publish(files, store, training, marker={"training_id": training}, workers=1)
            for name in (LATEST, PRODUCTION):
                point(store, "digits", name, f"{training}/{done.name}", {})

        return run

    return of


def run(doing, actor):
    """Returns whether the actor came to its end."""
    try:
        doing(WatchedStore(actor))
    except (Killed, StagingError, NoSuchModel):
        return False
    return True


def test_a_pointer_names_a_whole_model_whoever_is_killed_or_overtaken_where(upload):
    first, second = upload("digits-1", "first"), upload("digits-2", "second")
    again, same_again = upload("digits-1", "again"), upload("digits-2", "second")
    uploads = {"upload": second, "upload of the training in production": again}
    actors = {
        **uploads,
        "the same upload": same_again,
        "rollback": lambda store: rollback(store, "digits"),
        "promotion": lambda store: promote(store, "digits", "digits-0", by="a person"),
    }
    beginning = World()
    for one in (upload("digits-0", "zeroth"), first):
        assert run(one, Actor(beginning))

    def began():
        return World(beginning.objects)

    def operations(doing):
        actor = Actor(began())
        run(doing, actor)
        return actor.count

    tried = looks = 0

    def met(one, at, what, other, killed_at=None):
        """Another comes there, and is killed itself; returns how many operations it had."""
        nonlocal tried, looks
        world, others = began(), []
        meets = Actor(world, killed_at, "killed after")
        meeting = Actor(world, at, what, by=lambda: others.append(run(actors[other], meets)))
        ended = run(actors[one], meeting)
        left = {one: (actors[one], ended), other: (actors[other], others == [True])}
        check(world, {name: left[name] for name in left if name in uploads})
        tried, looks = tried + 1, looks + world.looks
        return meets.count

    for one, doing in actors.items():
        for at in range(operations(doing)):
            for what in ("killed before", "killed after", "fails", "no answer"):
                world = began()
                ended = run(doing, Actor(world, at, what))
                check(world, {one: (doing, ended)} if one in uploads else {})
                tried, looks = tried + 1, looks + world.looks
            for other in actors:
                # The other one may begin later, and then it has more to do: until it ends.
                for killed_at in range(1000):
                    if met(one, at, "overtaken", other, killed_at) <= killed_at:
                        break
                met(one, at, "answered late", other)
    print(f"\n{tried} interleavings, {looks} looks of the reader")
    assert tried > 1000


def check(world, uploads):
    """What was stopped is tried again; then the history has each promotion, once, in order."""
    for doing, ended in uploads.values():
        if not ended:
            assert run(doing, Actor(world))
    history = json.loads(world.objects["digits/production.json"])["history"]
    assert [event["number"] for event in history] == [*range(len(history), 0, -1)]
    promoted = Counter(
        event["publication"].rpartition("-")[0]
        for event in history
        if event["event"] == "promoted" and event["by"] != "a person"
    )
    assert set(promoted.values()) == {1}, promoted
    assert len(promoted) >= 2 + len(uploads)


def test_a_model_that_somebody_goes_back_from_is_gone_whoever_publishes_it_again(upload):
    """Its upload is cleared with another record, and is killed or overtaken anywhere."""
    beginning = World()
    for one in (upload("digits-1", "first", "good"), upload("digits-2", "second", "bad")):
        assert run(one, Actor(beginning))
    again = upload("digits-2", "third", "bad")

    def go_back(store):
        rollback(store, "digits", mark="a person's decision")

    def weights(world):
        named = json.loads(world.objects["digits/production.json"])["publication"]
        return world.objects[f"{named}/model/saved_model.pb"]

    tried = 0
    for one, other in ((again, go_back), (go_back, again)):
        counted = Actor(World(beginning.objects))
        run(one, counted)
        for at in range(counted.count):
            for what in ("killed before", "killed after", "fails", "no answer"):
                world = World(beginning.objects)
                run(one, Actor(world, at, what))
                for doing in (go_back, again, go_back):
                    assert run(doing, Actor(world))
                    tried += 1
                assert weights(world) == b"good", (at, what)
            for killed_at in (*range(30), None):
                world = World(beginning.objects)
                meets = Actor(world, killed_at, "killed after")
                run(one, Actor(world, at, "overtaken", by=lambda m=meets, o=other: run(o, m)))
                for doing in (go_back, again):
                    assert run(doing, Actor(world))
                assert weights(world) == b"good", (at, killed_at)
                tried += 1
    print(f"\n{tried} interleavings")
