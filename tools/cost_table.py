"""Print what papers have published beside what `tpcode.cost` computes, with the errors."""

from tpcode.cost import published


def main() -> None:
    print(published.table())
    for name, place in (("in sample", 1), ("model left out", 3)):
        errors = [abs(row[place]) for row in published.iteration_times()]
        print(f"\nK22 table 5, {name}: mean error {100 * sum(errors) / 8:.2f}%, largest {100 * max(errors):.2f}%")


if __name__ == "__main__":
    main()
