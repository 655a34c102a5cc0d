"""The prompts of the embedded model's head, and its training, by one command.

    python heads/smollm2-135m/recipe.py --data DIR --out OUT

DIR holds `spec_bench.jsonl` (Spec-Bench, Apache-2.0; questions whose id is divisible by four are left out,
they are for evaluation), `gsm8k_train.jsonl` (grade-school-math, MIT), `seed_tasks.jsonl` and
`user_oriented_instructions.jsonl` (self-instruct, Apache-2.0). The other prompts are written here, or by the
target itself. The answers are the target's. Every stage goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 4
NUM_INVENTED = 700
OPTIONS = (
    "--target embedded --minutes 50 --num-kv-heads 9 --draft-vocab-size 10240 --batch-tokens 384 "
    "--learning-rate 0.0005 --warmup 0.005 --final-rate 0.03 --ema 0.995 --evaluate-every 6"
)

FUNCTIONS = (
    "reverses a string",
    "counts the vowels in a string",
    "returns the n-th Fibonacci number",
    "checks whether a number is prime",
    "merges two sorted lists",
    "flattens a nested list",
    "removes duplicates from a list while keeping order",
    "computes the factorial of a number",
    "finds the longest word in a sentence",
    "sorts a list with bubble sort",
    "performs binary search",
    "computes the greatest common divisor of two numbers",
    "checks whether two strings are anagrams",
    "counts word frequencies in a text",
    "transposes a matrix",
    "multiplies two matrices",
    "reads a CSV file and sums a column",
    "converts a Roman numeral to an integer",
    "validates an email address",
    "computes the mean and standard deviation of a list",
    "finds the second largest number in a list",
    "rotates a list by k places",
    "generates all permutations of a string",
    "implements a stack with push and pop",
    "implements a queue with two stacks",
    "checks whether parentheses are balanced",
    "computes the Levenshtein distance of two strings",
    "finds the intersection of two lists",
    "returns the prime factors of a number",
    "groups words by their first letter",
    "converts a decimal number to binary",
    "finds the missing number in a list from 1 to n",
    "computes the sum of the digits of a number",
    "capitalises every word of a string",
    "inserts a key into a binary search tree",
)
TOPICS = (
    "photosynthesis",
    "black holes",
    "the French Revolution",
    "plate tectonics",
    "inflation",
    "vaccines",
    "machine learning",
    "the water cycle",
    "Shakespeare's Hamlet",
    "the Roman Empire",
    "climate change",
    "electric cars",
    "democracy",
    "supply and demand",
    "DNA",
    "the human heart",
    "volcanoes",
    "the Industrial Revolution",
    "blockchain",
    "quantum mechanics",
    "evolution",
    "the solar system",
    "healthy eating",
    "meditation",
    "the Silk Road",
    "World War II",
    "the immune system",
    "renewable energy",
    "artificial intelligence",
    "probability",
    "gravity",
    "the Renaissance",
    "coral reefs",
    "stoicism",
    "chess",
    "jazz music",
    "impressionism",
    "the stock market",
    "time management",
    "public speaking",
)
FORMS = (
    "Explain {} to a ten-year-old.",
    "Write a short essay about {}.",
    "What are the most important facts about {}?",
    "Give me five questions and answers about {}.",
    "Write a poem about {}.",
    "Compare the advantages and disadvantages of {} in a list.",
    "Summarize what is known about {} in three sentences.",
)
THINGS = (
    "the capital of Australia",
    "the longest river in South America",
    "the author of Pride and Prejudice",
    "the inventor of the telephone",
    "the largest planet",
    "the chemical symbol of gold",
    "the first man on the moon",
    "the highest mountain in Africa",
    "the currency of Japan",
    "the president who abolished slavery in the United States",
    "the painter of the Mona Lisa",
    "the composer of the Ninth Symphony in D minor",
    "the language spoken in Brazil",
    "the fastest land animal",
    "the tallest building in the world",
    "the founder of Microsoft",
    "the largest ocean",
    "the hardest natural substance",
    "the home of the Olympic Games",
    "the discoverer of penicillin",
)
GERMAN = (
    "Der Zug nach München fährt um neun Uhr ab .",
    "Die Regierung hat gestern ein neues Gesetz beschlossen .",
    "Viele Menschen warten seit Stunden auf den Bus .",
    "Das Wetter wird morgen im ganzen Land sonnig .",
    "Die Kinder spielen im Garten hinter dem Haus .",
    "Er hat den Vertrag noch nicht unterschrieben .",
    "Die Polizei sucht nach zwei Männern , die am Freitag eine Bank überfallen haben .",
    "Der Verein verlor das Spiel mit zwei zu drei .",
    "Die Stadt will bis zum nächsten Jahr dreißig neue Wohnungen bauen .",
    "Forscher haben eine neue Art von Fröschen entdeckt .",
    "Der Bürgermeister eröffnete die Ausstellung am Sonntag .",
    "Die Preise für Strom sind im letzten Monat stark gestiegen .",
    "In der Schule lernen die Schüler zwei Fremdsprachen .",
    "Der Unfall ereignete sich kurz vor Mitternacht auf der Autobahn .",
    "Sie arbeitet seit zehn Jahren als Ärztin in Berlin .",
    "Das Museum zeigt Bilder aus dem neunzehnten Jahrhundert .",
    "Der Minister sagte , dass die Verhandlungen gut laufen .",
    "Im Winter frieren die Seen in dieser Gegend zu .",
    "Die Firma stellt im Herbst fünfzig neue Mitarbeiter ein .",
    "Niemand weiß , wie lange der Streik noch dauern wird .",
)

Prompt = dict[str, Any]


def prompt(category: str, source: str, text: str, temperature: float = 0.0, most: int = 256) -> Prompt:
    return {
        "category": category,
        "source": source,
        "prompt": text,
        "temperature": temperature,
        "max_tokens": most,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def spec_bench(path: Path) -> Iterator[Prompt]:
    for entry in rows(path):
        category, text = entry["category"], entry["turns"][0]
        if entry["question_id"] % HELD_OUT == 0:
            continue
        yield prompt(category, "spec_bench", text)
        if category == "summarization":
            article = text.split(":", 1)[1].strip()
            yield prompt(category, "spec_bench+own", f"List the key points of this text: {article}")
            told = f"Explain in a few simple sentences what this article says.\n\n{article}"
            yield prompt(category, "spec_bench+own", told)
        elif category in ("translation", "qa", "rag", "math_reasoning"):
            yield prompt(category, "spec_bench", text, 0.7, 128)
        else:
            yield prompt(category, "spec_bench", text, 0.7)


def self_instruct(*paths: Path) -> Iterator[Prompt]:
    for path in paths:
        for task in rows(path):
            given = task["instances"][0]["input"]
            text = task["instruction"] + (f"\n\n{given}" if given else "")
            yield prompt("instruction", "self-instruct", text)
            yield prompt("instruction", "self-instruct", text, 0.7)


def own(chance: random.Random) -> Iterator[Prompt]:
    for task in FUNCTIONS:
        yield prompt("coding", "own", f"Write a Python function that {task}.")
        yield prompt("coding", "own", f"Write a function in JavaScript that {task}, and explain it.")
        tested = f"Write a Python function that {task}. Add a docstring and three test cases."
        yield prompt("coding", "own", tested, 0.5)
    for topic in TOPICS:
        for form in chance.sample(FORMS, 4):
            yield prompt("general", "own", form.format(topic), chance.choice([0.0, 0.0, 0.7]))
    for thing in THINGS:
        yield prompt("qa", "own", f"What or who is {thing}?", 0.0, 128)
        yield prompt("qa", "own", f"Tell me about {thing}.")
    for sentence in GERMAN:
        yield prompt("translation", "own", f"Translate German to English: {sentence}", 0.0, 128)


def prompts(data: Path) -> list[Prompt]:
    chance = random.Random(1)
    questions = [entry["question"] for entry in rows(data / "gsm8k_train.jsonl")]
    chance.shuffle(questions)
    found = [
        *spec_bench(data / "spec_bench.jsonl"),
        *self_instruct(data / "seed_tasks.jsonl", data / "user_oriented_instructions.jsonl"),
        *(prompt("math", "gsm8k-train", question, 0.0, 200) for question in questions[:500]),
        *own(chance),
    ]
    chance.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts(args.data)), encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", "eagle3", *OPTIONS.split()]
    command += ["--data", str(path), "--invent", str(NUM_INVENTED), "--out", str(args.out)]
    # Two threads that wait busily for each other lose half of the time where cores are shared.
    sys.exit(subprocess.call(command, env={"OMP_WAIT_POLICY": "passive", **os.environ}))


if __name__ == "__main__":
    main()
