"""Something to read while passes are timed: prose with a few turns that come again, as texts have."""

TEXT = """
The mill stood where the river bends, a little below the old bridge, and in dry summers its wheel did not
turn at all. The miller kept a ledger in which every sack was written down, first by his own hand and later
by his daughter's, who had learned to reckon from the priest. "What comes in must go out," he used to say,
"or it is still here." When the new road was built the carts went by another way, and the ledger had empty
pages; but when the river rose in the third spring after that, the bridge was the only one that held, and
all the carts came back. Then the wheel turned day and night. The daughter hired two men from the village,
and a third who came from the coast and knew how to mend gears, and wrote their wages beside the sacks: six
for the first, six for the second, eight for the third, because what comes in must go out. In the autumn she
bought the field behind the mill. She had it drained, planted willows along the ditch, and built a second,
smaller wheel that ran a saw. Boards cost less to carry than trees do. By the time her father died there
were four saws, a store with a bell over the door, and a school of one room where the children of the men
who mended the gears learned to reckon from a book that she had written herself. On its first page it said:
what comes in must go out, or it is still here; count it twice, write it once, and do not argue with the
river.

Measure the flow at noon. If the gauge reads below two feet, close the upper gate and open the lower one by
a quarter; if it reads above five, open both. Between two and five, leave the gates as they are and note the
reading. Repeat at six. Grain of the first grade is milled at forty turns, of the second at fifty, of the
third at sixty. Never mill at more than sixty turns: the stones grow warm, and the flour keeps badly. When
the stones are dressed, which is every third week, mark the day in the ledger, and the name of whoever did
the work. A stone of the first quality lasts eleven years, one of the second seven, and one of the third is
not worth its carriage. Oil the bearings on Mondays. Count the sacks in the evening, twice, and write the
number once.
""".strip()
