"""Tests of the table of sizes."""

from tests import sizes

SOURCE = '''"""One doc.

Two words."""

x = 1  # why


# alone
class A(B):
    """Three words here."""

    field: int = 0
    """Doc of a field."""

    def f(self):
        """Doc."""
        self.a = self.b = (
            self.c
        )
'''


def test_lines_of_code_are_neither_blank_nor_docs_nor_comments() -> None:
    assert sizes.code_lines(SOURCE) == 7


def test_words_are_those_of_docstrings_and_comments() -> None:
    assert sizes.words(SOURCE) == 4 + 1 + 1 + 3 + 4 + 1


def test_classes_and_functions_are_measured() -> None:
    classes, functions = sizes.definitions(SOURCE, "a.py")
    assert classes == [sizes.Size(11, "a.py A", "1 methods, 3 attributes")]
    assert functions == [sizes.Size(5, "a.py A.f")]


def test_the_table_is_printed(capsys) -> None:
    sizes.main(largest=2, packages=("examples", "configs"))
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["examples", "configs"]
    assert all(int(word.replace(",", "")) > 0 for line in table[1:3] for word in line.split()[1:])
    assert table.count("") == 3 and sum(line.startswith(" ") for line in table) == 6
