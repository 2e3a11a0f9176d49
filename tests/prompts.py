"""Prompts of many kinds for the demo pairs, written for these tests."""

from __future__ import annotations

from dataclasses import dataclass

from broker.sampling import Sampling


@dataclass(frozen=True)
class Prompt:
    """``chat``: a user message for the chat template; else plain text to continue."""

    name: str
    text: str
    chat: bool = True


_MINUTES = """\
Minutes of the allotment society, spring meeting. Present: the chair, the treasurer, eleven \
members and one dog. The chair opened the meeting at seven and thanked everybody for clearing \
the path along the brook after the flood. The treasurer reported that the society owns 412 in \
cash and 1,930 in the bank, that the new pump cost less than was feared, and that three plots \
have not paid their rent since the autumn. It was agreed to write to them once more and to offer \
the plots to the waiting list from the first of June. A member asked whether bonfires are \
allowed on Sundays. The chair answered that the rules say no, that nobody has kept the rules for \
twenty years, and that the neighbours have now complained in writing. After some discussion it \
was decided that bonfires may be lit on the first Saturday of the month, not before five in the \
afternoon, and that wet leaves belong on the compost. The second item was the shed. Its roof \
leaks above the lawnmowers, and two of the four lawnmowers no longer start. Offers for a new \
roof range from 600 to 2,100. The treasurer proposed to buy the material and to do the work \
together on two weekends in May; seven members put their names on the list. The dog was asked to \
leave after it had eaten the biscuits."""

_CODE = """\
Here is a class. Say what is wrong with it.

```python
class Stack:
    def __init__(self, items=[]):
        self.items = items

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0)

    def __len__(self):
        return len(self.items)
```"""

PROMPTS = [
    Prompt("bicycle", "Explain how a bicycle stays upright."),
    Prompt("list", "List seven things to pack for a walk in the mountains, one per line."),
    Prompt("poem", "Write a short poem about the sea in winter."),
    Prompt("sum", "What is 17 + 25? Answer with the number only."),
    Prompt("capital", "What is the capital of Portugal?"),
    Prompt("python", "Write a Python function that reverses a string without slicing."),
    Prompt("review", _CODE),
    Prompt("unicode", "Translate to English: „Příliš žluťoučký kůň úpěl ďábelské ódy.“ 🦙"),
    Prompt(
        "json",
        'Return a JSON object with the keys "name", "age" and "pets" for a fictional person.',
    ),
    Prompt("minutes", f"Sum up these minutes in two sentences.\n\n{_MINUTES}"),
    Prompt("steps", "Give me step by step instructions for making pancakes."),
    Prompt("short", "Hi"),
    Prompt("fox", "The quick brown fox", chat=False),
    Prompt("def", "def fibonacci(n: int) -> int:\n    ", chat=False),
    Prompt("table", "| city | country |\n|---|---|\n| Paris | France |\n| Rome |", chat=False),
    Prompt("count", "one, two, three, four, five, six,", chat=False),
    Prompt("story", "Once upon a time, in a lighthouse at the end of the world,", chat=False),
    Prompt("html", "<ul>\n  <li>apples</li>\n  <li>pears</li>\n", chat=False),
    Prompt("kanji", "日本の首都は", chat=False),
    Prompt("long", f"{_MINUTES} The third item was", chat=False),
]

GREEDY = Sampling()


def sampled(seed: int) -> Sampling:
    """As people use it, with a seed of its own."""
    return Sampling(temperature=0.8, top_p=0.95, seed=seed)


def long_texts() -> list[str]:
    """Five plain texts of more than 512 tokens each, with something from their beginning to use."""
    numbers = ", ".join(str(n) for n in range(1, 133))
    shopping = "\n".join(
        f"{amount} {unit} of {thing}"
        for amount, unit in (
            *((2, "bags"), (5, "boxes"), (1, "crate")),
            *((12, "tins"), (3, "pounds"), (8, "jars")),
        )
        for thing in (
            *("apples", "onions", "rice", "candles", "soap", "paper", "nails", "string", "beans"),
            *("coffee", "sugar", "matches", "salt", "tea", "honey", "flour", "oil", "pepper"),
        )
    )
    functions = "\n\n".join(
        f"def add_{n}(value: int) -> int:\n    return value + {n}" for n in range(27)
    )
    letter = f"Dear Agnes, I promised to send you the minutes, so here they are. {_MINUTES} "
    return [
        f"Count on: {numbers},",
        f"The password is heron.\n{_MINUTES}\n{_MINUTES}\nThe password is",
        f"Shopping list\n{shopping}\n7 bags of",
        f"{functions}\n\ndef add_27(",
        f"{letter * 2}Yours,",
    ]
