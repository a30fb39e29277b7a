"""All programs of the table, by kind and name."""

from programs import (
    test_keys,
    test_language,
    test_losses,
    test_metrics,
    test_models,
    test_odd,
)

PROGRAMS = {
    f"{module.__name__.split('test_')[-1]}: {name}": program
    for module in (test_losses, test_metrics, test_keys, test_language, test_models, test_odd)
    for name, program in module.PROGRAMS.items()
}
