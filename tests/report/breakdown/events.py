"""The events of a step of a pipeline whose tasks take given times, as workers would record them."""

from launcher.base.spans import Clock, Span
from launcher.report.pages.timeline import ProcessSpans
from launcher.schedule import Kind, dependencies

MS = 1_000_000
ORIGIN = 1_700_000_000_000_000_000


def pipeline_events(
    tasks,
    seconds,
    transfer=lambda src, dst: 0.0,
    process_of=lambda mesh: 0,
    data=lambda process: 0.0,
    update=0.0,
):
    """Run the tasks of every mesh in order, each as soon as what it needs is there.

    Args:
        tasks: the tasks of every mesh.
        seconds: those of a task.
        transfer: seconds from one mesh to another.
        process_of: the process of a mesh, which has one device.
        data: how long a process waits for its batch.
        update: seconds of each mesh's update.
    """
    stages = 1 + max(task.stage for of in tasks for task in of)
    mesh_of = {task.stage: mesh for mesh, of in enumerate(tasks) for task in of}
    spans = {process_of(mesh): [] for mesh in range(len(tasks))}

    def add(process, lane, name, start, end, kind, **about):
        times = (ORIGIN + round(t * 1e9) for t in (start, end))
        spans[process].append(Span(lane, name, *times, kind, about))

    for process in spans:
        add(process, "data", "batch", 0.0, data(process), "data")
    ends, free = {}, [data(process_of(mesh)) for mesh in range(len(tasks))]
    left, count = [list(of) for of in tasks], {}
    while any(left):
        before = sum(map(len, left))
        for mesh, of in enumerate(left):
            needs = dependencies(of[0], stages) if of else (None,)
            if not of or any(need not in ends for need in needs):
                continue
            task, ready = of.pop(0), free[mesh]
            for need in needs:
                src = mesh_of[need.stage]
                if src == mesh:
                    continue
                number = count[src, mesh] = count.get((src, mesh), -1) + 1
                there = ends[need] + transfer(src, mesh)
                about = {"src_mesh": src, "dst_mesh": mesh, "number": number}
                where = process_of(mesh)
                add(where, "transfers", "t", ends[need], there, "transfer", **about)
                ready = max(ready, there)
            ends[task] = free[mesh] = ready + seconds(task)
            _run(add, process_of(mesh), mesh, task, ready, ends[task])
        assert sum(map(len, left)) < before, "the order cannot be followed"
    for mesh in range(len(tasks)):
        about = {"mesh": mesh, "program": f"update.{mesh}"}
        start, end = free[mesh], free[mesh] + update
        if update:
            add(process_of(mesh), f"device {mesh}", "update", start, end, "update", **about)
    return [ProcessSpans(f"worker {p}", tuple(found), Clock()) for p, found in spans.items()]


def _run(add, process, mesh, task, start, end):
    about = {"mesh": mesh, "program": "p", "stage": task.stage, "microbatch": task.microbatch}
    name = f"stage {task.stage} {task.kind.value} {task.microbatch}"
    add(process, f"device {mesh}", name, start, end, task.kind.value, **about)


def lengths(task):
    """Seconds of a task: the backward pass takes twice the forward pass."""
    return {Kind.FORWARD: 0.010, Kind.BACKWARD: 0.020}.get(task.kind, 0.010)
