"""The patch queue: applies ``patches/`` to an installed vLLM and proves by hashes what is there.

Every patch names the git blob id of each file it touches, before and after. These ids decide everything:
hunks go in only where the text is exactly the one they were made against, and nothing is written before
the whole series has been applied in memory. ``patch`` and ``git apply`` are not used because their exit
codes can't be trusted here: the one answers 1 for "already applied" and for a conflict alike, the other can
do nothing and answer 0 inside an ignored folder of a repository.

Standard library only: an image build runs this before anything else is installed.
"""

import argparse
import importlib.util
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.errors import PatchError
from appliance.patchformat import Patch, blob_id, parse_patch, render_sections
from appliance.patchtree import Tree, write_tree

MAX_CHANGED_LINES = 120
REQUIRED_FIELDS = ("Why", "Why-Not-A-Plugin", "Origin", "Forwarded", "Remove-When", "Test")
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Upstream:
    """What the queue is made for: ``upstream.toml``.

    Attributes:
        version: of vLLM.
        distributions: names under which it is installed.
        only_in: files that not every distribution carries, and those which do.
    """

    version: str
    distributions: tuple[str, ...]
    only_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """A loaded patch queue, in the order of its series; ``left_out`` are files that a tree does without."""

    folder: Path
    upstream: Upstream
    patches: tuple[Patch, ...]
    left_out: tuple[str, ...] = ()

    def paths(self) -> list[str]:
        """Every file that the series touches, sorted."""
        return sorted({file.path for patch in self.patches for file in patch.files})

    def ids_after(self, count: int) -> dict[str, str]:
        """Blob ids of all touched files once the first ``count`` patches are in."""
        ids: dict[str, str] = {}
        for patch in self.patches:
            for file in patch.files:
                ids.setdefault(file.path, file.before)
        for patch in self.patches[:count]:
            ids.update({file.path: file.after for file in patch.files})
        return ids


def load_queue(folder: Path) -> Queue:
    """Read ``upstream.toml``, ``series`` and every patch named there.

    Raises:
        PatchError: a file is missing, unreadable or malformed, a patch file is not in the series, or two
            patches of one file don't follow each other.
    """
    upstream = _load_upstream(folder / "upstream.toml")
    names = [
        line.strip()
        for line in _read_text(folder / "series").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for name in names:
        if names.count(name) > 1:
            raise PatchError(f"{folder / 'series'}: {name} is listed twice")
        if not (folder / name).is_file():
            raise PatchError(f"{folder / 'series'}: {name} is listed, but there is no such file")
    unlisted = sorted({path.name for path in folder.glob("*.patch")} - set(names))
    if unlisted:
        raise PatchError(f"{folder / 'series'}: {unlisted[0]} is not listed")
    queue = Queue(folder, upstream, tuple(parse_patch(folder / name) for name in names))
    _check_chain(queue)
    return queue


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{path}: can't be read: {error}") from error


def _load_upstream(path: Path) -> Upstream:
    try:
        table = tomllib.loads(_read_text(path))
        only_in = {str(file): tuple(map(str, names)) for file, names in table.get("only_in", {}).items()}
        upstream = Upstream(str(table["version"]), tuple(map(str, table["distributions"])), only_in)
    except tomllib.TOMLDecodeError as error:
        raise PatchError(f"{path}: not TOML: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise PatchError(f"{path}: needs `version` and a list `distributions` ({error})") from error
    for file, names in only_in.items():
        # A misspelt name would leave the file out where it belongs.
        if not names or set(names) - set(upstream.distributions):
            raise PatchError(f"{path}: only_in: {file}: accepted: a list out of {', '.join(upstream.distributions)}")
    return upstream


def _check_chain(queue: Queue) -> None:
    ids: dict[str, str] = {}
    for patch in queue.patches:
        for file in patch.files:
            expected = ids.get(file.path, file.before)
            if file.before != expected:
                raise PatchError(
                    f"{patch.path}: {file.path} starts from blob {file.before}, "
                    f"but the patches before it leave {expected}"
                )
            ids[file.path] = file.after


def find_root() -> Path:
    """The site-packages folder of this interpreter's vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError(f"no vLLM is installed for {sys.executable}; name its site-packages with --root")
    return Path(spec.origin).parent.parent


def check_version(root: Path, upstream: Upstream) -> set[str]:
    """Refuse a tree of another vLLM version, read from the distributions' metadata folders; returns their names.

    Raises:
        PatchError: no distribution of vLLM is there, or one of another version.
    """
    wanted = upstream.version
    found: set[str] = set()
    for name in upstream.distributions:
        stem = re.sub(r"[-_.]+", "_", name)
        for folder in root.glob(f"{stem}-*.dist-info"):
            version = folder.name[len(stem) + 1 : -len(".dist-info")]
            found.add(name)
            # A local part (+cu130, +cpu) tells how it was built, not from which sources.
            if version.split("+")[0] != wanted:
                raise PatchError(f"{root}: found {name} {version}; the patch queue is made for {wanted}")
    if not found:
        names = " or ".join(upstream.distributions)
        raise PatchError(f"{root}: found no distribution {names}; the patch queue is made for {wanted}")
    return found


def fit(root: Path, queue: Queue) -> Queue:
    """The queue without the files that the tree's distribution does not carry.

    Which these are is told by ``only_in`` and by the name of the distribution, never by a file's absence: one
    that should be there and is not stays an error.

    Raises:
        PatchError: such a file is there all the same, or the version is another one.
    """
    found = check_version(root, queue.upstream)
    left_out = sorted(path for path, names in queue.upstream.only_in.items() if not found & set(names))
    for path in left_out:
        if (root / path).exists():
            names = " or ".join(queue.upstream.only_in[path])
            raise PatchError(f"{root / path}: is there, but only {names} should have it, not {' or '.join(found)}")
    return replace(queue, patches=tuple(patch.without(left_out) for patch in queue.patches), left_out=tuple(left_out))


def _told(queue: Queue) -> str:
    """Which files a fitted queue leaves out, in brackets; nothing where it leaves out none."""
    only = [f"{path} is only in {', '.join(queue.upstream.only_in[path])}" for path in queue.left_out]
    return f" ({'; '.join(only)})" if only else ""


def read_tree(root: Path, queue: Queue) -> Tree:
    """Contents of every file that the series touches."""
    tree: Tree = {}
    for path in queue.paths():
        try:
            tree[path] = (root / path).read_bytes()
        except OSError as error:
            raise PatchError(f"{root / path}: can't be read: {error.strerror}") from error
    return tree


def applied_count(root: Path, queue: Queue, tree: Tree) -> int:
    """How many patches, from the first on, are in the tree; the rest must not be there even in part.

    An older state of a growing series is such a prefix, and can be carried on.

    Raises:
        PatchError: a file is neither as upstream has it nor as the series leaves it, or only some of the
            files of a patch are changed.
    """
    found = {path: blob_id(data) for path, data in tree.items()}
    for count in range(len(queue.patches), -1, -1):
        if queue.ids_after(count) == found:
            return count
    raise PatchError(_describe_mismatch(root, queue, found))


def _describe_mismatch(root: Path, queue: Queue, found: dict[str, str]) -> str:
    pristine, final = queue.ids_after(0), queue.ids_after(len(queue.patches))
    states = [queue.ids_after(count) for count in range(len(queue.patches) + 1)]
    for path, blob in found.items():
        if all(blob != ids[path] for ids in states):
            return (
                f"{root / path}: foreign content: expected blob {pristine[path]} (upstream) or {final[path]} "
                f"(patched), found {blob}; reinstall vLLM {queue.upstream.version}, then apply"
            )
    path = next(path for path, blob in found.items() if blob != final[path])
    return (
        f"{root / path}: the series is applied in part: expected blob {final[path]}, found {found[path]}, "
        f"while other files are patched; reinstall vLLM {queue.upstream.version}, then apply"
    )


def tree_states(queue: Queue, tree: Tree, applied: int) -> list[Tree]:
    """The tree after 0, 1, ... n patches, from a tree that has the first ``applied`` of them."""
    states = {applied: tree}
    for index in range(applied, len(queue.patches)):
        states[index + 1] = queue.patches[index].apply(states[index])
    for index in range(applied, 0, -1):
        states[index - 1] = queue.patches[index - 1].revert(states[index])
    return [states[index] for index in range(len(queue.patches) + 1)]


def apply(root: Path, queue: Queue) -> str:
    """Bring the tree to the end of the series; returns one line that tells what was done."""
    queue = fit(root, queue)
    tree = read_tree(root, queue)
    applied = applied_count(root, queue, tree)
    total = len(queue.patches)
    if applied == total:
        return f"already applied: {total} patches, {len(tree)} files{_told(queue)} in {root}"
    changed = write_tree(root, tree, tree_states(queue, tree, applied)[-1])
    before = f" ({applied} were there)" if applied else ""
    files = f"{len(changed)} files{_told(queue)}"
    return f"applied {total - applied} of {total} patches{before}: {files} in {root}"


def verify(root: Path, queue: Queue) -> str:
    """Check that every touched file is exactly as the series leaves it.

    Raises:
        PatchError: names the first file that is not, with the expected and the found blob id.
    """
    queue = fit(root, queue)
    tree = read_tree(root, queue)
    for path, expected in queue.ids_after(len(queue.patches)).items():
        found = blob_id(tree[path])
        if found != expected:
            raise PatchError(f"{root / path}: not patched: expected blob {expected}, found {found}")
    return f"verified: {len(queue.patches)} patches, {len(tree)} files{_told(queue)} in {root}"


def exported(root: Path, queue: Queue, pristine: Path | None = None) -> dict[Path, bytes]:
    """Every patch file as it would be written from the trees.

    Without ``pristine``, the upstream texts come from reverting the series on ``root``. With it, the last
    patch of the series takes up every difference that the patches before it leave, so it is the one to edit.
    The section of a file that the tree does without stays as it is.
    """
    fitted = fit(root, queue)
    if pristine is None:
        tree = read_tree(root, fitted)
        states = tree_states(fitted, tree, applied_count(root, fitted, tree))
    else:
        rest = replace(fitted, patches=fitted.patches[:-1])
        before = {path: (pristine / path).read_bytes() for path in _differing(pristine, root, rest)}
        states = tree_states(rest, before, 0)
        states.append({path: (root / path).read_bytes() for path in before})
    return {
        patch.path: _rendered(patch, fitted.left_out, states[index], states[index + 1])
        for index, patch in enumerate(queue.patches)
    }


def _rendered(patch: Patch, left_out: Collection[str], old: Tree, new: Tree) -> bytes:
    kept = {file.path: file.section for file in patch.files if file.path in left_out}
    sections = kept | render_sections(old, new)
    return patch.header + b"".join(sections[path] for path in sorted(sections))


def _differing(pristine: Path, root: Path, queue: Queue) -> list[str]:
    paths = set(queue.paths())
    for file in (root / "vllm").rglob("*.py"):
        path = file.relative_to(root).as_posix()
        if not (pristine / path).is_file():
            raise PatchError(f"{file}: not in {pristine}; a patch may only change files that upstream has")
        if (pristine / path).read_bytes() != file.read_bytes():
            paths.add(path)
    return sorted(paths)


def check(root: Path, queue: Queue, repository: Path = REPOSITORY) -> str:
    """Check the admission rule, and that exporting gives the patch files as they are.

    Raises:
        PatchError: names the patch and what is wrong with it.
    """
    for patch in queue.patches:
        if not patch.files:
            raise PatchError(f"{patch.path}: changes no file")
        if patch.changed_lines > MAX_CHANGED_LINES:
            raise PatchError(f"{patch.path}: {patch.changed_lines} changed lines; at most {MAX_CHANGED_LINES}")
        for name in REQUIRED_FIELDS:
            if not patch.field(name):
                raise PatchError(f"{patch.path}: the header has no `{name}:`")
        _check_test_exists(patch, repository)
    if unknown := sorted(set(queue.upstream.only_in) - set(queue.paths())):
        raise PatchError(f"{queue.folder / 'upstream.toml'}: only_in: {unknown[0]}: no patch changes this file")
    for path, data in exported(root, queue).items():
        if path.read_bytes() != data:
            raise PatchError(f"{path}: exporting gives other bytes; run `scripts/patches export`")
    lines = sum(patch.changed_lines for patch in queue.patches)
    return f"checked: {len(queue.patches)} patches, {lines} changed lines"


def _check_test_exists(patch: Patch, repository: Path) -> None:
    for test in patch.field("Test").split():
        file, _, name = test.partition("::")
        path = repository / file
        if not path.is_file() or not name or f"def {name}(" not in path.read_text(encoding="utf-8"):
            raise PatchError(f"{patch.path}: its header names the test {test}, which does not exist")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/patches", description="Mjolnir's patch queue for vLLM.")
    commands = {
        "apply": "patch an installed vLLM; says so when it already is",
        "verify": "check by hashes that every touched file is patched",
        "export": "rewrite the patch files from the trees",
        "check": "check the admission rule, and that export gives identical bytes",
    }
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(commands))
    for name, text in commands.items():
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.add_argument("--root", type=Path, help="site-packages folder (default: this interpreter's vLLM)")
        sub.add_argument("--queue", type=Path, default=REPOSITORY / "patches", help="folder with the series")
        if name == "export":
            sub.add_argument("--pristine", type=Path, help="unpatched tree; edits go into the last patch")
    return parser


def _run(args: argparse.Namespace) -> str:
    queue = load_queue(args.queue)
    root = (args.root or find_root()).resolve()
    if args.command == "export":
        files = exported(root, queue, args.pristine)
        stale = {path: data for path, data in files.items() if path.read_bytes() != data}
        for path, data in stale.items():
            path.write_bytes(data)
        return f"exported {len(files)} patches: {len(stale)} changed"
    return {"apply": apply, "verify": verify, "check": check}[args.command](root, queue)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it succeeded, 1 with one line on stderr when not, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    try:
        sys.stdout.write(_run(args) + "\n")
    except (PatchError, OSError) as error:
        sys.stderr.write(f"patches: {error}\n")
        return PatchError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
