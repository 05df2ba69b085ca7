"""Builds the modules that the cache does not hold: one ninja call for all, one builder per module across processes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from attnloom.core.errors import CompilerNotFound, JitDisabled, LoadFailed
from attnloom.core.jit.cache import LIBRARY, Cache
from attnloom.core.jit.failure import failure
from attnloom.core.jit.key import content_hash, headers, ingredients, module_key
from attnloom.core.jit.ninja import INCLUDE, Hung, Step, run_ninja, steps_of, write_build_file
from attnloom.core.jit.spec import ModuleSpec
from attnloom.core.jit.toolchain import Toolchain, recipe, toolchain
from attnloom.core.settings import settings

Progress = Callable[[int, int, str], None]
"""Called as (modules built, modules to build, name of the module just built)."""


@dataclass(frozen=True)
class _Job:
    """A module to be built: ``headers`` are the texts its key was made from, ``place`` its folder in the cache."""

    spec: ModuleSpec
    headers: dict[str, str]
    content: str
    key: str
    place: Path
    toolchain: Toolchain
    steps: tuple[Step, ...]


def locate(spec: ModuleSpec) -> Path | None:
    """The module's library in the cache, or None where it is to be built.

    Raises:
        JitDisabled: it is not there, and ``ATTNLOOM_JIT=off``.
        CompilerNotFound: it is not there, and no compiler is either.
        CacheUnusable: others could have written it.
        LoadFailed: it is damaged, and ``ATTNLOOM_JIT=off``.
    """
    now = settings()
    cache = Cache(now.cache_dir)
    content = content_hash(spec, headers(spec), recipe(spec.family, spec.target))
    key = content
    missing: CompilerNotFound | None = None
    try:
        key = module_key(content, toolchain(spec.family, spec.target))
    except CompilerNotFound as error:
        missing = error
    try:
        library = cache.find(spec.name, key) if missing is None else None
        if library is None and (missing is not None or not now.jit):
            # Nothing can be built here: a module that another compiler made of the same content serves as well.
            library = cache.find_content(spec.name, content)
    except LoadFailed:
        if missing is not None or not now.jit:
            raise
        return None
    if library is not None:
        return library
    if not now.jit:
        raise JitDisabled(
            f"module {spec.name} (key {key[:16]}) is not in the cache {cache.root}, and ATTNLOOM_JIT=off forbids "
            "building it. Fill the cache ahead, or set ATTNLOOM_JIT=on.",
            module=spec.name,
            key=key,
        )
    if missing is not None:
        raise missing
    return None


def build(specs: Iterable[ModuleSpec], *, progress: Progress | None = None) -> list[Path]:
    """Build the modules that are missing, all at once, and give the library of each.

    Safe to call from many processes and threads: each module is built by one of them, the others wait for it.

    Args:
        specs: the modules; the result has their order.
        progress: told of each module that was built here.

    Raises:
        CompileFailed: a compiler refused a source. The modules that could be built are in the cache.
        CompileTimedOut: no compiler ended for a quarter of an hour; they were ended.
        JitError: another of its subclasses, as :func:`locate`, or CacheUnusable where a miss cannot be written.
    """
    wanted = list(specs)
    found = {spec: locate(spec) for spec in dict.fromkeys(wanted)}
    missing = [spec for spec, library in found.items() if library is None]
    if missing:
        found |= _build_missing(missing, progress)
    libraries = [found[spec] for spec in wanted]
    return [library for library in libraries if library is not None]


def _build_missing(specs: list[ModuleSpec], progress: Progress | None) -> dict[ModuleSpec, Path | None]:
    cache = Cache(settings().cache_dir)
    jobs = [_job(spec, cache) for spec in specs]
    cache.prepare()
    found: dict[ModuleSpec, Path | None] = {}
    with cache.locked(job.place for job in jobs) as locks:
        todo = []
        for job in jobs:
            found[job.spec] = locate(job.spec)  # another may have built it while we waited for its lock
            if found[job.spec] is None:
                todo.append(job)
            else:
                locks.pop(job.place).release()

        def built(job: _Job, library: Path) -> None:
            found[job.spec] = library
            locks.pop(job.place).release()
            if progress is not None:
                progress(sum(found[other.spec] is not None for other in todo), len(todo), job.spec.name)

        if todo:
            with cache.private_folder() as private:
                _run(cache, private, todo, built)
    return found


def _job(spec: ModuleSpec, cache: Cache) -> _Job:
    tools = toolchain(spec.family, spec.target)
    reached = headers(spec)
    content = content_hash(spec, reached, tools.recipe)
    key = module_key(content, tools)
    place = cache.folder(spec.name, key)
    return _Job(spec, reached, content, key, place, tools, tuple(steps_of(spec, tools, place.name)))


def _run(cache: Cache, private: Path, jobs: list[_Job], built: Callable[[_Job, Path], None]) -> None:
    for job in jobs:
        with cache.writing():
            _write_sources(job, private / job.place.name)
    pending = list(jobs)

    def publish_finished() -> None:
        for job in list(pending):
            folder = private / job.place.name
            if (folder / LIBRARY).exists():
                pending.remove(job)
                for made in folder.glob("*.o"):
                    made.unlink()
                built(job, cache.publish(folder, job.spec.name, job.key, _record(job)))

    steps = [step for job in jobs for step in job.steps]
    with cache.writing():
        write_build_file(steps, private)
    hung = False
    try:
        status, printed = run_ninja(len(steps), private, publish_finished)
        printed = f"ninja ended with status {status}:\n{printed}"
    except Hung as error:
        hung, printed = True, str(error)
    publish_finished()
    if pending:
        # Where compilers hung, most had not begun.
        job = next((job for job in pending if any(step.begun(private) for step in job.steps)), pending[0])
        raise failure(cache, private, job.spec.name, job.key, job.steps, printed, hung=hung)


def _write_sources(job: _Job, folder: Path) -> None:
    # Copies of the headers, so that what is compiled is what was hashed, whoever edits csrc/ meanwhile.
    texts = {
        source.name: source.text if isinstance(source.text, str) else source.text.text() for source in job.spec.sources
    }
    texts |= {f"{INCLUDE}/{name}": text for name, text in job.headers.items()}
    folder.mkdir(mode=0o700)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _record(job: _Job) -> dict[str, object]:
    """What goes into build.json: what was run, on what."""
    return {
        "family": job.spec.family,
        "content": job.content,
        "compiler": job.toolchain.identity,
        "target": job.spec.target,
        "arch": job.toolchain.recipe.arch,
        "flags": job.toolchain.recipe.flags,
        "commands": [shlex.join(step.command) for step in job.steps],
        "sources": [source.name for source in job.spec.sources],
        "headers": sorted(job.headers),
        "csrc": ingredients(job.spec, job.headers),
    }
