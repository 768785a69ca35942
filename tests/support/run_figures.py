"""Made-up figures of runs, as the JSON of stats, of a benchmark and of a trace."""

from typing import Any

SWEEP = [(1, 100.0), (2, 198.0), (4, 200.0), (8, 150.0)]


def course(count: int) -> list[dict[str, float]]:
    part = {"seconds": 0.5, "batches": 3, "rows": 30, "ready": 4.5, "waited": 0.1}
    return [{"began": number / 2, **part} for number in range(count)]


def stage(name: str, share: float) -> dict[str, Any]:
    waits = {"starved": 0.0, "blocked": 0.1, "seconds": 0.002, "limit": None}
    return {"name": name, "place": "worker", "utilisation": share, **waits}


def stats(limit: str = "decode", **more: Any) -> dict[str, Any]:
    verdict = {"limit": limit, "rate": 1234.5, "unit": "images", "sentence": f"{limit} limits"}
    return {"loads": [stage("read", 0.1), stage(limit, 0.8)], "verdict": verdict, **more}


def bench(**more: Any) -> dict[str, Any]:
    runs = [{"value": value, "images_per_second": rate} for value, rate in SWEEP]
    figures = {"first_batch": 1.5, "gap_p50": 0.1, "gap_p99": 0.2, "bytes_per_second": 5e7}
    return {
        "stats": stats(),
        "sweep": {"option": "batch_size", "runs": runs},
        "disk": None,
        **figures,
        **more,
    }


def trace_of(*names: str) -> dict[str, Any]:
    """A trace in which two workers do the named stages in turn."""
    spans = [
        {
            "ph": "X",
            "cat": "stage",
            "name": names[n % len(names)],
            "tid": 1 + n % 2,
            "ts": 1e5 * n,
            "dur": 2e5,
        }
        for n in range(30)
    ]
    return {"traceEvents": [{"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": names[0]}}, *spans]}
