"""A source tree that a patch is installed into: all files are written or none, and all can be taken back."""

import hashlib
import json
import os
import shutil
from typing import Callable, Dict, List, Optional, Set

KEPT = ".amct_patch"
MANIFEST = "installed.json"

Say = Callable[[str], None]


class PatchError(Exception):
    """Nothing was changed; ``problems`` has a sentence for each reason."""

    def __init__(self, problems: List[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Stage:
    """Files that are written together, and what is said before and after."""

    def __init__(self, before: List[str], files: Dict[str, bytes], after: List[str]) -> None:
        self.before, self.files, self.after = before, files, after


class Tree:
    """A Caffe's source tree, with what was written there: by path, ``sha256`` and whether it ``replaced`` a file."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self.kept = os.path.join(self.root, KEPT)
        self.entries: Dict[str, Dict[str, object]] = {}
        self.is_complete = True
        try:
            with open(os.path.join(self.kept, MANIFEST), encoding="utf-8") as file:
                content = json.load(file)
            self.entries, self.is_complete = content["files"], content["complete"]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PatchError(["{}: cannot be read: {}".format(os.path.join(self.kept, MANIFEST), error)]) from error

    def full(self, path: str) -> str:
        """The path of a file on this machine."""
        return os.path.join(self.root, *path.split("/"))

    def read(self, path: str) -> Optional[bytes]:
        """What a file holds; None if there is none."""
        return _content(self.full(path))

    def is_ours(self, path: str) -> bool:
        """Whether a file is as this patch has written it."""
        content = self.read(path)
        return path in self.entries and content is not None and _digest(content) == self.entries[path]["sha256"]

    def before(self, path: str) -> Optional[bytes]:
        """What a file held before the patch; one that the user has changed since is taken as it is."""
        if not self.is_ours(path):
            return self.read(path)
        return _content(os.path.join(self.kept, *path.split("/"))) if self.entries[path]["replaced"] else None

    def recover(self, say: Say) -> None:
        """Take back an install that was interrupted."""
        if not self.is_complete:
            say("An install was interrupted here; it is taken back first.")
            self.take_back(say)

    def write(self, stages: List[Stage], say: Say) -> bool:
        """Write the files of all stages; if one cannot be written, none is. Tells whether something was changed."""
        wanted = {path: content for stage in stages for path, content in stage.files.items()}
        dropped = [path for path in self.entries if path not in wanted and self.is_ours(path)]
        held = {path: self.read(path) for path in list(wanted) + dropped}
        changed = {path for path, content in wanted.items() if held[path] != content} | set(dropped)
        links = [path for path in sorted(changed) if os.path.islink(self.full(path))]
        if links:
            raise PatchError(["{}: is a link; only files of the tree itself are changed".format(links[0])])
        entries, made = self.entries, _MadeFolders()
        try:
            if changed:
                self._keep(wanted, made)
            for stage in stages:
                self._write_stage(stage, changed, made, say)
            for path in dropped:
                self._restore(path, entries[path])
            if changed:
                self._note(complete=True, made=made)
        except BaseException as error:
            self._roll_back({path: held[path] for path in changed}, entries, made)
            if isinstance(error, OSError):
                raise PatchError(["{}; nothing was changed".format(error)]) from error
            raise
        return bool(changed)

    def _write_stage(self, stage: Stage, changed: Set[str], made: "_MadeFolders", say: Say) -> None:
        for line in stage.before:
            say(line)
        for path, content in stage.files.items():
            if path in changed:
                _replace(self.full(path), content, made)
        for line in stage.after:
            say(line)

    def _keep(self, wanted: Dict[str, bytes], made: "_MadeFolders") -> None:
        """Put aside what will be replaced, and note what will be written."""
        entries: Dict[str, Dict[str, object]] = {}
        for path, content in wanted.items():
            known = self.entries.get(path)
            replaced = bool(known["replaced"]) if known else os.path.exists(self.full(path))
            if replaced and not known:
                target = os.path.join(self.kept, *path.split("/"))
                made.make(os.path.dirname(target))
                shutil.copy2(self.full(path), target)
            entries[path] = {"sha256": _digest(content), "replaced": replaced}
        self.entries = entries
        self._note(complete=False, made=made)

    def _note(self, complete: bool, made: "_MadeFolders") -> None:
        text = json.dumps({"complete": complete, "files": self.entries}, indent=1, sort_keys=True)
        _replace(os.path.join(self.kept, MANIFEST), text.encode("utf-8"), made)

    def _roll_back(
        self, held: Dict[str, Optional[bytes]], entries: Dict[str, Dict[str, object]], made: "_MadeFolders"
    ) -> None:
        for path, content in held.items():
            if content is None:
                _remove(self.full(path))
            elif self.read(path) != content:
                _replace(self.full(path), content, made)
        self.entries = entries
        if entries:
            self._note(complete=True, made=made)
        else:
            shutil.rmtree(self.kept, ignore_errors=True)
        made.remove()

    def take_back(self, say: Say) -> None:
        """Restore all files; one that was changed since is kept beside it as ``.changed``."""
        try:
            for path, entry in sorted(self.entries.items()):
                content = self.read(path)
                if self.is_complete and content is not None and not self.is_ours(path):
                    shutil.copy2(self.full(path), self.full(path) + ".changed")
                    say("'{}' was changed since: kept as '{}.changed'".format(path, path))
                self._restore(path, entry)
            shutil.rmtree(self.kept)
        except OSError as error:
            raise PatchError(["{}: cannot be restored; the files are in {}".format(error, self.kept)]) from error
        self.entries, self.is_complete = {}, True

    def _restore(self, path: str, entry: Dict[str, object]) -> None:
        kept = os.path.join(self.kept, *path.split("/"))
        if entry["replaced"]:
            content = _content(kept)
            if content is not None and content != self.read(path):
                _replace(self.full(path), content, _MadeFolders())
            return
        _remove(self.full(path))
        folder = os.path.dirname(self.full(path))
        while folder != self.root and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


class _MadeFolders:
    """Folders that were made, to be removed if all is taken back."""

    def __init__(self) -> None:
        self.folders: List[str] = []

    def make(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        self.make(os.path.dirname(folder))
        os.mkdir(folder)
        self.folders.append(folder)

    def remove(self) -> None:
        for folder in reversed(self.folders):
            if os.path.isdir(folder) and not os.listdir(folder):
                os.rmdir(folder)


def _content(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PatchError(["{}: cannot be read: {}".format(path, error)]) from error


def _replace(path: str, content: bytes, made: _MadeFolders) -> None:
    made.make(os.path.dirname(path))
    new = path + ".amct_new"
    try:
        with open(new, "wb") as file:
            file.write(content)
        if os.path.exists(path):
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        _remove(new)
        raise


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
