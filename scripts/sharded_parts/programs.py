"""Programs of a part: compiled side by side, judged one by one."""

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

Programs = dict[Any, concurrent.futures.Future[Any]]


def side_by_side(jobs: Mapping[Any, Callable[[], Any]]) -> Programs:
    """Does jobs at once and waits for all; one that fails does so where its result is asked for."""

    def done(name: Any, job: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = job()
        print(f"# {name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
        return result

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return {name: pool.submit(done, name, job) for name, job in jobs.items()}


def row(name: Mapping[str, Any], measure: Callable[..., Mapping[str, Any]], *args: Any) -> dict:
    """Returns a row with what `measure` found, or with its error, which must not hide the next."""
    try:
        return {**name, **measure(*args)}
    except Exception as error:
        return {**name, "error": f"{type(error).__name__}: {error}"[:600]}
