"""A few prompts of our own for each workload, so that a benchmark runs where no prompt files are at hand."""

from __future__ import annotations

_CODE = "Complete this Python function.\n\n```python\n{}\n```"
_EDIT = "{}\n\n```python\n{}\n```\n\nReturn the whole changed code."
_SUMMARY = "Summarise this report in three sentences.\n\n{}"

_INVENTORY = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if name in self.items:
            self.items[name] = self.items[name] + count
        else:
            self.items[name] = count

    def remove(self, name, count):
        if name not in self.items:
            return False
        if self.items[name] < count:
            return False
        self.items[name] = self.items[name] - count
        return True

    def total(self):
        result = 0
        for name in self.items:
            result = result + self.items[name]
        return result"""

_TRIANGLE = '''def kind_of_triangle(a, b, c):
    """Says whether a triangle is equilateral, isosceles or scalene."""
    if a == b and b == c:
        return "equilateral"
    if a == b or b == c or a == c:
        return "isosceles"
    return "scalene"'''

_AVERAGES = """def running_averages(values, width):
    averages = []
    for start in range(len(values) - width + 1):
        total = 0
        for offset in range(width):
            total += values[start + offset]
        averages.append(total / width)
    return averages"""

_PARSER = """def parse_settings(text):
    settings = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, value = line.split("=", 1)
        settings[name.strip()] = value.strip()
    return settings"""

_FERRY = (
    "The harbour council met on Tuesday to decide about the old ferry. The boat, which has "
    "crossed the bay six times a day since 1971, needs a new engine and repairs to its hull that "
    "would cost about as much as half a new vessel. The operator proposed to replace it by two "
    "smaller electric boats, each for sixty passengers, that could leave every twenty minutes. "
    "Shop owners on the eastern shore supported the plan, because more crossings would bring more"
    " visitors. Farmers opposed it: the new boats could not carry tractors or lorries, and the "
    "bridge is forty kilometres away. After three hours the council asked the operator for a "
    "third proposal, in which the old ferry would sail twice a day for vehicles only until a new "
    "one can be paid for. A decision is expected in spring, when the results of a survey among "
    "the people of both shores will be known."
)
_ORCHARD = (
    "For eleven years the agricultural school has kept two orchards of the same size side by "
    "side. In one of them the grass between the trees is mown every fortnight; in the other it is"
    " left to grow and is cut once, at the end of July. The first harvests hardly differed. From "
    "the fourth year on, however, the orchard with long grass needed less water, and counts of "
    "beetles and wild bees were three times as high. Its yield fell behind by a tenth in wet "
    "years, when mice damaged the bark of young trees, and was ahead by as much in the two years "
    "of drought. The teachers conclude that neither way is better everywhere. They now advise "
    "growers to leave every second row unmown, to protect the trunks of young trees with wire, "
    "and to decide anew each spring by the amount of rain that fell in winter."
)
_LIBRARY = (
    "When the town library closed for repairs, its staff expected that people would simply wait. "
    "Instead, readers began to lend books to each other from shelves in bakeries, laundries and "
    "the waiting room of the station. A retired teacher kept a list of who had what, first in a "
    "notebook and later on a website that her grandson made. Within five months the list held "
    "nine thousand titles, more than the library itself had lent in the same months of the year "
    "before. When the building opened again the director invited the teacher to continue. The "
    "shelves in the shops remain, the library's own catalogue shows what stands on them, and a "
    "van brings back books that travelled too far. Two neighbouring towns have asked how it was "
    "done; the answer fits on one page and begins with the words: find somebody who likes lists."
)
_TUNNEL = (
    "Engineers who inspected the northern railway tunnel found that water enters at eighteen "
    "places, four more than two years ago. None of them endangers trains, but salt in the water "
    "corrodes the fastenings of the rails. The company will drill drainage holes during seven "
    "weekends this autumn, when trains are replaced by buses. A complete new lining, which would "
    "stop the water for some sixty years, would close the line for fourteen months and was "
    "rejected for that reason. Passenger groups welcomed the decision but asked for more buses "
    "than last year, when people waited for over an hour in the rain. The company answered that "
    "it has hired thirty buses instead of twenty and will publish, every hour, how long the "
    "journey takes."
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "I have a free Saturday, a bicycle and no plan. Suggest a day that I would remember.",
        "Explain to a ten-year-old why the sea is salty and rivers are not.",
        "Write a short letter to a neighbour whose dog barks at night. Be friendly but clear.",
        "What should somebody consider who wants to change from an office job to baking bread?",
        "Describe an old lighthouse at dawn from the point of view of a gull.",
        "Compare learning a language from books with learning it by living abroad.",
        "My tomato plants have yellow leaves at the bottom. What may be wrong, and what can I do?",
        "Invent three rules for a board game about postmen and explain how one wins.",
    ),
    "code": (
        _CODE.format(
            "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
            '    """Merges two ascending lists into one that is ascending, without calling sort."""'
        ),
        _CODE.format(
            "def longest_run(text: str) -> tuple[str, int]:\n"
            '    """The character with the longest run of repetitions in `text`, and the run\'s length."""'
        ),
        _CODE.format(
            "def to_roman(number: int) -> str:\n"
            '    """The Roman numeral of a number from 1 to 3999; ValueError for any other."""'
        ),
        _CODE.format(
            "def spiral(matrix: list[list[int]]) -> list[int]:\n"
            '    """The elements of a rectangular matrix, clockwise from the outside to the middle."""'
        ),
        _CODE.format(
            "def word_counts(path: str, most: int) -> list[tuple[str, int]]:\n"
            '    """The `most` frequent words of a text file, case ignored, with how often each occurs."""'
        ),
        _CODE.format(
            "def is_balanced(text: str) -> bool:\n"
            '    """Whether round, square and curly brackets in `text` are closed in the right order."""'
        ),
    ),
    "edit": (
        _EDIT.format("Raise a KeyError in `remove` where it returns False now.", _INVENTORY),
        _EDIT.format("Add type hints, and make `total` one line.", _INVENTORY),
        _EDIT.format("Raise a ValueError for sides that cannot form a triangle.", _TRIANGLE),
        _EDIT.format("Make it run in linear time by keeping a running total.", _AVERAGES),
        _EDIT.format("Let a value be quoted, and report the line number of a line without `=`.", _PARSER),
    ),
    "maths": (
        "A baker sells 48 rolls in the morning and a third as many in the afternoon. Each costs "
        "65 cents. How much does she earn that day? Think step by step.",
        "A train leaves at 9:40 and arrives at 13:05 after a stop of 15 minutes. It covers 285 "
        "kilometres. What is its average speed while it moves? Think step by step.",
        "Three friends share 84 marbles. Ann has twice as many as Ben, and Ben has four more than"
        " Cleo. How many has each? Think step by step.",
        "A garden is 18 metres long and 12 metres wide. A path one metre wide runs around it, "
        "inside. What area is left for plants? Think step by step.",
        "A shop lowers a price of 80 euros by 15 percent and later raises it by 10 percent. What "
        "is it then? Think step by step.",
        "A tank holds 240 litres. One pipe fills it in 40 minutes, another empties it in 60. How "
        "long does it take to fill when both are open? Think step by step.",
    ),
    "summary": tuple(map(_SUMMARY.format, (_FERRY, _ORCHARD, _LIBRARY, _TUNNEL))),
}
