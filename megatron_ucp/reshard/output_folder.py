"""A folder that is written aside and appears whole or not at all."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_ucp.errors import SaveError, UsageError
from megatron_ucp.formats import durable
from megatron_ucp.formats.deepspeed.paths import MODEL, MODEL_PARTITION


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """The folder beside `folder` that files are written into; the block gives it its name. It is
    gone after an error.

    Raises UsageError where another process writes it, SaveError where the disk refuses.
    """
    aside = durable.aside_of(folder.absolute().parent, folder.absolute().name)
    try:
        with ExitStack() as left:
            aside.parent.mkdir(parents=True, exist_ok=True)
            _hold(aside, left)
            yield aside
    except OSError as error:
        raise SaveError(
            "the output could not be written; nothing is left of it",
            file=error.filename or folder,
            found=f"{type(error).__name__}: {error}",
            fix="free space or mend permissions, then try again",
        ) from error


def _hold(aside: Path, left: ExitStack) -> None:
    """Holds a folder for this process until `left`. Raises UsageError where another has it."""
    try:
        left.enter_context(durable.held(aside))
    except SaveError as error:
        raise UsageError(
            "another conversion is writing this output",
            file=error.file,
            expected=error.expected,
            found=error.found,
            fix=error.what_to_do,
            id=error.id,
        ) from None


FileRun = tuple[Path, int, int]  # file, first byte, how many bytes (0: all from there on)


def in_threads(
    threads: ThreadPoolExecutor,
    jobs: Iterable[Callable[[], FileRun | None]],
    stopped: threading.Event,
) -> None:
    """Runs all jobs, several at a time. The disk begins with what one has written while the others
    go on. After a failure, and after Ctrl-C, `stopped` is set, and those that have not begun don't
    begin."""
    waiting: list[Future[FileRun | None]] = []
    try:
        waiting.extend(threads.submit(job) for job in jobs)
        for done in as_completed(waiting):
            if written := done.result():
                begin_sync(*written)
    finally:
        if not all(one.done() for one in waiting):
            stopped.set()
        for one in waiting:
            one.cancel()


def begin_sync(path: Path, start: int = 0, size: int = 0) -> None:
    """Lets the disk begin with `size` bytes of a file from `start` on (0: to its end) while others
    are made. Only a hint: `sync_all` waits for all of them."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux
    if call is not None:
        handle = os.open(path, os.O_RDONLY)
        call(handle, ctypes.c_int64(start), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE
        os.close(handle)


def sync_all(folder: Path) -> None:
    """Brings a folder with all that lies in it to disk: by one call for the whole file system,
    where there is one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    except AttributeError:  # no such call on this system
        sync = durable.Syncs()
        for path in sorted(folder.rglob("*")):
            sync(path)
        sync(folder)
    finally:
        os.close(handle)


# ------------------------------------------------ before anything is written


def require_plain(folder: Path, may_replace: Callable[[], object] | None = None) -> None:
    """Raises UsageError for an output that exists, unless `may_replace` says that it may be
    replaced, or that has no plain name."""
    if may_replace is None or not may_replace():
        require_free(folder)
    if folder.absolute().name.startswith(".") or not folder.name:
        raise UsageError(
            "the output is the plain name of a new folder",
            file=folder,
            expected="converted/global_step100",
            found=str(folder),
            fix="give such a name",
        )


def require_free(folder: Path) -> None:
    """Raises UsageError for an output that exists."""
    if folder.exists() or folder.is_symlink():
        raise UsageError(
            "the output exists",
            file=folder,
            expected="a folder that does not exist yet",
            found="one that does",
            fix="give another name, or remove it; export-hf replaces its own with --force (Python: "
            "force=True)",
        )


def require_outside(folder: Path, source: Path) -> None:
    """A `latest` in a tag folder would lead every load of that tag astray. Raises UsageError."""
    parent = Path(os.path.realpath(folder)).parent  # of a loop of links, too
    beside = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    if Path(os.path.realpath(source)) in (parent, *parent.parents) or any(
        MODEL.fullmatch(n) or MODEL_PARTITION.fullmatch(n) for n in beside
    ):
        raise UsageError(
            "the output lies inside of a checkpoint",
            file=folder,
            expected="a place beside it",
            found=parent,
            fix="name the output in another folder",
        )
