"""Ratios of other implementations' times to ours: the line of a cell, and the summary of all cells."""

import settings


def report(cell, dtype, ms, work=1.0):
    """Prints the line of a cell, whose operations are `work` times the forward pass's.

    Returns the ratio of each other implementation's time to ours.
    """
    rates = "  ".join(f"{name} {work * cell.tflops(taken):5.0f}" for name, taken in ms.items())
    others = {name: taken / ms["ours"] for name, taken in ms.items() if name != "ours"}
    line = f"{cell}  {dtype:4}  TFLOP/s: {rates}"
    if others:
        best = min(others, key=others.get)
        line += f"  ratio {others[best]:.3f} ({best})"
    print(line, flush=True)
    return others


def summarise(ratios):
    """Prints geometric means of ratios, and the worst cell. `ratios` are pairs of a cell and what `report` returned for
    it. The mean of an implementation is over the cells that it supports.
    """
    best = [(min(others.values()), cell) for cell, others in ratios if others]
    if not best:
        return
    print(f"\ngeometric mean to the best: {settings.geometric_mean([ratio for ratio, _ in best]):.3f}")
    for name in dict.fromkeys(name for _, others in ratios for name in others):
        of_name = [others[name] for _, others in ratios if name in others]
        print(f"geometric mean to {name}: {settings.geometric_mean(of_name):.3f} ({len(of_name)} cells)")
    worst, cell = min(best, key=lambda pair: pair[0])
    print(f"worst cell, to the best: {worst:.3f} ({cell})")
