"""The prompts that `mjolnir calibrate` shows a model: ours, diverse on purpose.

A channel's scale is only as good as what was seen of it, so there is chat, code, mathematics, data, prose, and a dozen
languages, and prompts from a few words to a page. Every eighth makes a small set that is diverse too.
"""

_DEPOT = (
    "Report of the depot, week 14. The loading bay was closed on Monday because of ice on the ramp. Truck 7 came back "
    "with two pallets of tiles that nobody had ordered; they stand in row C until the supplier answers. The forklift's "
    "battery was changed on Wednesday and lasts a full shift again. On Thursday the inventory found 1,204 boxes where "
    "the books say 1,199. Four boxes turned up behind the compressor, the fifth is still a riddle. Nobody was hurt. "
)
_LEMMA = (
    "Let f be a continuous function on [0, 1] with f(0) = f(1). Show that for every positive whole number n there is "
    "an x in [0, 1 - 1/n] with f(x) = f(x + 1/n). Hint: look at the sum of g(k/n) for g(x) = f(x + 1/n) - f(x). "
)

PROMPTS = (
    "What is the capital of France?",
    "Write a Python class for a bank account with deposit, withdraw and a useful error.",
    "Solve 3x + 7 = 31 and check the result.",
    "Wie funktioniert eine Wärmepumpe? Antworte in drei Sätzen.",
    _DEPOT + "Who should be told about what? Make a list.",
    "Tell me a story about a lighthouse keeper who collects clouds.",
    "Translate into Japanese: The train leaves at seven, please be on time.",
    "Give the SQL for a table of books with authors, and a query for the ten most lent ones.",
    "List the names, symbols and atomic numbers of the first twelve elements.",
    "Explain to a pilot in training how a stall comes about and how to end it.",
    "Écris un court poème sur la pluie à Bruxelles.",
    "What is the derivative of x^2 * sin(x)? Show each step.",
    _LEMMA,
    "Fix this: for i in range(10) print(i",
    "Schrijf een e-mail aan de buren over het feest van zaterdag.",
    "What are the arguments for and against a four-day week?",
    "Write a Rust function that parses '12:34:56' into seconds and returns a Result.",
    "¿Cuáles son los ingredientes de una tortilla de patatas y cómo se prepara?",
    "Make a JSON object that describes a robot with three joints, each with limits and a name.",
    "Summarise: " + _DEPOT * 3,
    "Who was Ada Lovelace?",
    "Count backwards from 40 to 1 in steps of three.",
    "用中文解释为什么天空是蓝色的。",
    "Write a limerick about a compiler that is never happy.",
    "Our service answers slowly every night at two. What would you look at, in which order?",
    "Convert 0x3F2 to decimal and to binary.",
    "Napisz krótki dialog między klientem a sprzedawcą w piekarni.",
    "Describe the water cycle with the words evaporation, condensation and precipitation.",
    "Write a regular expression for dates like 2026-12-03 and explain it piece by piece.",
    "If a train goes 180 km in 1 h 30 min, how far does it go in 50 minutes?",
    "Explain recursion with an example from cooking.",
    "Напиши три совета человеку, который учится кататься на лыжах.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg, and does nothing twice.",
    "What does the word 'serendipity' mean? Use it in two sentences.",
    "हिंदी में बताइए कि चाय कैसे बनाई जाती है।",
    _DEPOT + "Translate this report into Spanish.",
    "Prove that the square root of two is irrational.",
    "Complaint: my parcel came open and half empty. Answer as the shop, politely and with a way forward.",
    "Name ten birds, with one thing that tells each from the others.",
    "int f(int n) { return n < 2 ? n : f(n-1) + f(n-2); } What does it return for 10, and why is it slow?",
    "Qual è la differenza tra un vulcano attivo e uno spento?",
    "Draw up a shopping list for six people and a barbecue, in a table with amounts.",
    "Roll a die twice. How likely is a sum of nine? Show all cases.",
    "Write the first paragraph of a detective story set on a space station.",
    "한국어로 자기소개를 써 주세요.",
    "Compare TCP and UDP in five points.",
    "class Node: pass  # write insert, find and delete for a binary search tree, with types",
    "How do I get candle wax out of a tablecloth?",
    "اكتب جملتين عن البحر في الصيف.",
    "Here are numbers: 3, 9, 4, 4, 7, 12, 1. Give mean, median, mode and standard deviation.",
    "Play the part of a museum guide in front of a steam engine.",
    "Explain what a mutex is, when it deadlocks, and how to see that in a debugger.",
    "Skriv en kort väderrapport för norra Sverige i februari.",
    "What is the boiling point of water on a mountain of 3,000 m? Explain why.",
    "Write HTML and CSS for a card with a picture, a title and a button.",
    "Por que as folhas mudam de cor no outono?",
    _DEPOT * 5 + "Which sentence is the most important one, and why?",
    "Give me three names for a bakery, and a slogan for each.",
    "Kerro suomeksi, miten saunaan mennään oikein.",
    "Explain the rules of chess to someone who knows draughts.",
    "Write a unit test in pytest for a function slugify(text).",
    "What should be in a first-aid kit for a week in the mountains?",
    "Translate 'knowledge is power' into Latin, Greek and Finnish.",
    "A farmer has hens and rabbits, 35 heads and 94 feet. How many of each?",
)
