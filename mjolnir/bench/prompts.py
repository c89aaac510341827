"""Thirty chat prompts of our own: short and long, prose, code, lists, numbers, other languages."""

_LONG = (
    "The delivery robot R7 left the depot at six in the morning with fourteen parcels. Its first stop was the "
    "bakery on Mill Street, where the owner signed for two boxes of yeast. At the second stop nobody was home,"
    " so it left a card and kept the parcel. Between the second and the third stop it had to wait eleven "
    "minutes at a level crossing, because a goods train with sixty wagons went by. The third, fourth and fifth"
    " parcels went to the same office block; the lift was out of order, and a clerk came down to fetch them. "
    "After the fifth stop the battery stood at sixty-one percent. "
)

PROMPTS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "What is 17 plus 25? Explain each step.",
    "Explain to a child why the sky is blue.",
    "List five things to check before a long drive.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate 'good morning, my friend' into Spanish.",
    "What does a thermostat do?",
    "Give me a recipe for pancakes with exact amounts.",
    "Who wrote Romeo and Juliet, and when?",
    "Describe a lighthouse in two sentences.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short letter asking a landlord to repair a window.",
    "Name the planets of the solar system in order.",
    "How does a bicycle stay upright?",
    "Summarise the story of the tortoise and the hare.",
    "Write a SQL query that counts the orders of each customer.",
    "What should I do if I smell gas in my kitchen?",
    "Continue: Once upon a time, in a village by the river,",
    "Was ist die Hauptstadt von Deutschland?",
    "Écris une phrase sur le printemps.",
    "Give three arguments for and three against working from home.",
    "Write a bash command that finds all files larger than one megabyte.",
    "What is photosynthesis?",
    "Make a table of the first ten square numbers.",
    _LONG + "How many parcels had been delivered when the battery stood at sixty-one percent?",
    _LONG * 2 + "Which parts of this report are written twice?",
    _LONG * 3 + "Summarise the report in one sentence.",
    _LONG * 4 + "What did the robot do at the second stop?",
)
