"""The driver's view of all workers."""

from types import SimpleNamespace

from launcher.driver.workers import compile_everywhere


def test_programs_are_counted_over_all_workers():
    """Each answer is of all workers; one that is done with its own does not hold up the others."""
    answers = iter([[1, 1], [2, 1], [2, 3], [2, 5]])
    asked, told = [], []

    def submit(method, *arguments):
        if method == "setup":
            return SimpleNamespace(result=lambda: 7.5)
        asked.append((method, *arguments))
        return SimpleNamespace(each=lambda: next(answers))

    plan = SimpleNamespace(to_dict=dict)
    workers = SimpleNamespace(submit=submit, plan=plan)
    begun = SimpleNamespace(each=lambda: [2, 5])
    assert compile_everywhere(workers, begun, lambda *how_far: told.append(how_far)) == 7.5
    assert asked == [("compiled", 0), ("compiled", 1), ("compiled", 1), ("compiled", 3)]
    assert told == [(done, 7, "programs") for done in (0, 2, 3, 5)]


def test_workers_without_a_program_are_not_asked():
    workers = SimpleNamespace(
        submit=lambda method, *_: SimpleNamespace(result={"setup": lambda: 0.1}[method]),
        plan=SimpleNamespace(to_dict=dict),
    )
    assert compile_everywhere(workers, SimpleNamespace(each=lambda: [0, 0]), print) == 0.1
