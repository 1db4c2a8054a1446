"""The small world of the sample corpora: the topics that people have in common, and their phrases.

A topic has values; a value has ways to state it (a persona line) and things that go with it. A reply
names the things, never the words of the statement: what links "i work as a nurse" to "the ward was
full again" has to be learnt from other people who are nurses.
"""

from __future__ import annotations

from typing import NamedTuple


class Value(NamedTuple):
    """One thing that a person can be, have or like."""

    statements: tuple[str, ...]
    things: tuple[str, ...]


class Topic(NamedTuple):
    """Something people ask each other about."""

    questions: tuple[str, ...]
    """With the *word* that an answer may take up."""
    replies: tuple[str, ...]
    """`{a}` and `{b}` stand for things of the speaker's value; without `{b}`, `{a}` is two of them."""
    heading: str
    """The section of an article about a town that this topic becomes."""
    facts: tuple[str, ...]
    """Sentences of that section."""
    values: tuple[Value, ...]


def _topic(heading: str, questions: str, replies: str, facts: str, values: dict[str, str]) -> Topic:
    def split_phrases(text: str, mark: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in text.split(mark))

    topic_values = tuple(
        Value(split_phrases(statements, "/"), split_phrases(things, ","))
        for statements, things in values.items()
    )
    return Topic(
        split_phrases(questions, "/"),
        split_phrases(replies, "/"),
        heading,
        split_phrases(facts, "/"),
        topic_values,
    )


TOPICS: dict[str, Topic] = {
    "work": _topic(
        "Economy",
        "what do you do for a *living* ? / how is *work* going ? / what is your *job* ? "
        "/ do you like your *boss* ? / did you have a long *day* ?",
        "it was {a} and {b} again all day / i spend my days with {a} / mostly {a} , now and then {b} "
        "/ i am kept busy by {a} / i get paid for {a} , can you believe it ?",
        "Most people earn their money with {a} and {b}. / {a} has employed half of the town since "
        "the war. / A guild for {a} was founded by the council. / Trade in {b} brought a railway.",
        {
            "i work as a nurse / i look after sick people": "the night shift, a full ward, "
            "clean scrubs, bandages, blood tests, the surgeons, my patients, hospital beds",
            "i am a teacher / i stand before a class every morning": "spelling tests, noisy pupils, "
            "the blackboard, parent evenings, homework, report cards, the school bell, red ink",
            "i am a baker / i make bread in a small shop": "sourdough, rye flour, the hot oven, "
            "fresh rolls, yeast, sweet buns, a wooden peel, early mornings",
            "i write software / i am a programmer": "bug reports, code review, the compiler, "
            "a broken build, keyboards, deadlines, the test server, merge conflicts",
            "i am a farmer / i run my uncle's farm": "milking, the harvest, hay bales, muddy boots, "
            "the tractor, wheat fields, cattle feed, a broken fence",
            "i drive a taxi / i take people to the airport": "rush hour, the meter, rude passengers, "
            "heavy luggage, tips, wrong addresses, one way streets, night fares",
        },
    ),
    "pets": _topic(
        "Wildlife",
        "do you have any *pets* ? / is there an *animal* in your home ? / do you like *animals* ? "
        "/ who keeps you *company* ?",
        "i found {a} on the sofa again / right now it is all {a} and {b} here / you should see {a} "
        "/ {a} cost me a fortune this month / i was woken up by {a} and {b}",
        "The woods around it are known for {a}. / Visitors come to see {a} and {b} in spring. "
        "/ A reserve by the river protects {a}. / {b} was first described here.",
        {
            "i have two dogs / i walk my puppy at dawn": "wagging tails, a chewed slipper, barking, "
            "the leash, tennis balls, buried bones, a wet nose, belly rubs",
            "i own three cats / a kitten lives with me": "purring, scratched curtains, the litter box, "
            "hairballs, a ball of wool, whiskers, sharp claws, catnip",
            "i keep fish / there is an aquarium in my room": "the glass tank, bubbles, water plants, "
            "a filter, guppies, tiny flakes, gravel, colourful fins",
            "i have a parrot / my bird talks to me": "feathers, the cage, loud whistling, "
            "sunflower seeds, a swing, rude words, flapping wings, molting",
            "i ride my horse / we own a pony": "the stable, a saddle, oats, hoof prints, a long mane, "
            "galloping, the riding boots, straw",
            "i keep bees / there are hives behind my house": "honey jars, the smoker, a veil, stings, "
            "beeswax, clover blossoms, humming, the queen",
        },
    ),
    "sport": _topic(
        "Sport",
        "do you do any *sports* ? / how do you keep *fit* ? / do you *exercise* ? "
        "/ are you doing anything to stay in *shape* ?",
        "this week it was {a} and {b} / i am getting better at {a} / nobody knows how hard {a} can be "
        "/ my body hurts because of {a} / nothing beats {a} after a bad day",
        "The local club is famous for {a}. / {a} and {b} draw large crowds every year. "
        "/ A hall for {a} was opened by the mayor. / The youth team won a cup for {b}.",
        {
            "i swim every day / i love being in the pool": "the butterfly stroke, goggles, chlorine, "
            "forty laps, a deep dive, the lifeguard, wet towels, flip turns",
            "i play football / i am a striker in a team": "penalty kicks, a muddy pitch, the goalkeeper, "
            "corner flags, shin guards, yellow cards, a header, the offside rule",
            "i climb mountains / i go rock climbing": "ropes, chalk, the overhang, carabiners, "
            "a steep wall, the summit, a belay, loose stones",
            "i do yoga / i stretch with a group in the park": "the downward dog, a rubber mat, slow breath, "
            "balance, the lotus pose, incense, headstands, meditation",
            "i run marathons / i jog along the river": "blisters, a new pace, the finish line, "
            "interval training, energy gels, mile markers, running shoes, a stitch",
            "i play tennis / i hit the court on sundays": "a double fault, the backhand, a racket, "
            "a strong serve, the umpire, volleys, match point, the net",
        },
    ),
    "music": _topic(
        "Culture",
        "what kind of *music* do you like ? / do you play an *instrument* ? / what are you *listening* to ? "
        "/ do you like *concerts* ?",
        "i can not get enough of {a} / my evenings are {a} and {b} / the neighbours complain about {a} "
        "/ i close my eyes and hear {a} / i get goosebumps from {a}",
        "A festival of {a} fills the streets in june. / The old theatre is known for {a} and {b}. "
        "/ {a} was heard here for the first time. / A society for {b} meets in the library.",
        {
            "i love heavy metal / i am in a metal band": "loud guitars, long hair, a mosh pit, "
            "double bass drums, screaming, black shirts, distortion, amplifiers",
            "i listen to classical music / i go to the opera": "a string quartet, the conductor, violins, "
            "a slow movement, arias, the orchestra pit, a soprano, sonatas",
            "i like jazz / i play the saxophone": "improvisation, a smoky club, swing, brass solos, "
            "a walking bass, blue notes, the trumpet, brushed cymbals",
            "i am into country music / i grew up with country songs": "a banjo, cowboy hats, "
            "steel strings, fiddles, broken hearts, a slow two step, nashville, harmonicas",
            "i make techno / i am a dj": "turntables, a drop, strobe lights, synthesizers, headphones, "
            "a dance floor, the mixer, vinyl",
            "i sing in a choir / i sing hymns at church": "the alto part, four voices, sheet music, "
            "the organ, vocal warm ups, harmony, carols, robes",
        },
    ),
    "food": _topic(
        "Cuisine",
        "what is your favorite *food* ? / are you *hungry* ? / what did you have for *dinner* ? "
        "/ do you like *cooking* ?",
        "i just made {a} with {b} / i could eat {a} every day / give me {a} and i am happy "
        "/ my kitchen smells of {a} / nothing for me without {a} and {b}",
        "Its cooks are praised for {a}. / {a} with {b} is served at weddings. "
        "/ The market sells {a} from the region. / A recipe for {b} is kept in the town hall.",
        {
            "i love pizza / italian dishes are the best": "mozzarella, basil leaves, a crispy crust, "
            "tomato sauce, olives, fresh pasta, parmesan, oregano",
            "i eat sushi all the time / i adore japanese cuisine": "raw salmon, soy sauce, wasabi, "
            "chopsticks, pickled ginger, seaweed, miso soup, sticky rice",
            "i am a vegan / i never eat meat": "tofu, lentils, chickpeas, kale salad, oat milk, "
            "roasted vegetables, quinoa, almond butter",
            "i live for barbecue / i grill every weekend": "smoked ribs, charcoal, pulled pork, "
            "a juicy steak, burgers, sausages, brisket, marinade",
            "i have a sweet tooth / i can not resist desserts": "chocolate cake, whipped cream, caramel, "
            "cookies, ice cream, cheesecake, pudding, sprinkles",
            "i like spicy mexican food / tacos are my life": "jalapenos, guacamole, hot salsa, "
            "tortillas, black beans, burritos, limes, nachos",
        },
    ),
    "home": _topic(
        "Geography",
        "what is your *home* like ? / what do you see from your *window* ? / do you like the *place* where you live ? "
        "/ how is the *neighborhood* ?",
        "i look out and see {a} / here it is all {a} and {b} / i could not live without {a} "
        "/ what i like best is {a} / some days i am tired of {a}",
        "The land is shaped by {a}. / Maps of the county show {a} and {b}. "
        "/ {a} lies north of the centre. / Painters came for {b}.",
        {
            "i live by the sea / i have a house on the coast": "seagulls, salty air, the lighthouse, "
            "sand dunes, high tide, sailing boats, driftwood, the pier",
            "i live in a big city / my flat is downtown": "skyscrapers, the subway, sirens, "
            "crowded sidewalks, street vendors, neon signs, rooftop bars, honking",
            "i live in the desert / my town is hot and dry": "cactuses, rattlesnakes, red rocks, "
            "sandstorms, dusty roads, lizards, cold nights, canyons",
            "i live in the mountains / my cabin stands at three thousand feet": "deep snow, pine trees, "
            "a ski lift, glaciers, wooden huts, alpine meadows, avalanches, thin air",
            "i live in the jungle / my village is in the rainforest": "monkeys, palm leaves, mosquitoes, "
            "heavy rain, a muddy river, vines, tree frogs, humidity",
            "i live on a small island / one needs a boat to get to me": "coconuts, coral reefs, "
            "the ferry, hammocks, turtles, a quiet lagoon, fishing nets, shells",
        },
    ),
    "hobby": _topic(
        "Crafts",
        "what do you do in your free *time* ? / do you have a *hobby* ? / any plans for the *weekend* ? "
        "/ what do you do for *fun* ?",
        "i lose track of time with {a} / this weekend is for {a} and {b} / i am proud of {a} "
        "/ my table is covered with {a} / i ordered {a} last night",
        "Its workshops make {a}. / {a} and {b} are sold in the arcade. "
        "/ A school for {a} stands beside the church. / The museum shows {b}.",
        {
            "i paint / i spend my time in a studio": "oil colours, an easel, brushes, a canvas, "
            "portraits, water colours, charcoal sketches, turpentine",
            "i take photographs / i never leave home without a camera": "a wide lens, the shutter, "
            "a tripod, portraits at dusk, long exposures, the darkroom, film rolls, a flash",
            "i knit / i make sweaters for everyone": "balls of yarn, needles, a woolly scarf, mittens, "
            "purl stitches, patterns, a crochet hook, lost loops",
            "i play video games / i have four consoles": "a new controller, boss fights, high scores, "
            "online lobbies, power ups, speed runs, side quests, respawns",
            "i garden / i grow my own vegetables": "tomato seedlings, compost, weeds, a watering can, "
            "rose bushes, earthworms, a greenhouse, tulip bulbs",
            "i build model trains / i have a railway in the basement": "tiny tracks, signals, locomotives, "
            "paper tunnels, miniature trees, switches, glue, timetables",
        },
    ),
    "family": _topic(
        "Population",
        "tell me about your *family* . / do you have *kids* ? / are you *married* ? "
        "/ do you have *relatives* ?",
        "well , {a} and {b} , that says it all / i always have to think of {a} / i love {a} "
        "/ at our place it is {a} day and night / i would not trade {a} for anything",
        "The register of the parish tells of {a}. / Old customs such as {a} and {b} live on. "
        "/ {a} is mentioned in a letter of the bishop. / Songs about {b} are still known.",
        {
            "i just had a baby / i am a new mother": "diapers, lullabies, sleepless nights, a pacifier, "
            "mashed carrots, a stroller, first steps, tiny socks",
            "i am getting married soon / i am planning our wedding": "the guest list, a white dress, "
            "rings, the honeymoon, bridesmaids, a tall cake, vows, flowers for the aisle",
            "i have five brothers / i come from a big family": "loud dinners, bunk beds, old pranks, "
            "hand me downs, wrestling, a full van, cousins, queues for the bathroom",
            "i am divorced / my ex and i split up": "lawyers, an empty flat, custody weekends, papers, "
            "dating apps, a single bed, boxes, new beginnings",
            "i am a grandmother / i have seven grandchildren": "old stories, knitted socks, cookies in a tin, "
            "sunday visits, photo albums, birthday cards, spoiled little ones, a rocking chair",
            "i am single / i live on my own": "blind dates, frozen dinners, silence, one plate, "
            "nobody to ask, late mornings, the whole couch, solo trips",
        },
    ),
    "travel": _topic(
        "Transport",
        "do you like to *travel* ? / where did you go last *summer* ? / any *trips* lately ? "
        "/ did you have a good *vacation* ?",
        "i remember {a} and {b} / next year it will be {a} again / i feel free with {a} "
        "/ i have seen {a} in twelve countries / i packed for {a} yesterday",
        "Travellers reach it by {a}. / {a} and {b} connect it with the capital. "
        "/ Work on {a} began after the flood. / The station keeps {b}.",
        {
            "i ride a motorcycle / my bike takes me everywhere": "a leather jacket, the open road, "
            "chrome, a helmet, hairpin bends, a loud engine, side mirrors, road dust",
            "i love flying / i spend my holidays in planes": "boarding passes, turbulence, "
            "window seats, the runway, jet lag, duty free shops, tray tables, layovers",
            "i go on cruises / i travel by ship": "the upper deck, a cabin, sea sickness, port calls, "
            "the captain's dinner, life boats, buffets, waves",
            "i camp in the wild / i sleep in a tent": "a sleeping bag, campfires, bear spray, marshmallows, "
            "pegs, a gas stove, lanterns, starry skies",
            "i travel by train / i cross the land on rails": "sleeper cars, platforms, the dining car, "
            "conductors, tickets, tunnels, missed connections, whistles",
            "i hitchhike / i thumb rides with strangers": "cardboard signs, truck stops, "
            "a heavy backpack, friendly drivers, motorway ramps, a worn map, waiting, country radio",
        },
    ),
    "books": _topic(
        "Literature",
        "do you read many *books* ? / what are you *reading* ? / any good *movies* lately ? "
        "/ what is your favorite *story* ?",
        "last night it was {a} until two / i am a sucker for {a} / there has to be {a} and {b} in it "
        "/ my shelves are full of {a} / i dreamt of {a}",
        "Several novels set here deal with {a}. / A library of {a} and {b} was left to the town. "
        "/ {a} is the subject of a well known poem. / Its printers were fined for {b}.",
        {
            "i read crime novels / i love a good mystery": "a detective, fingerprints, alibis, "
            "a locked room, suspects, poison, clues, a missing body",
            "i like science fiction / i watch films about space": "aliens, warp drives, robots, "
            "time machines, laser guns, distant planets, cyborgs, a starship",
            "i am a fan of fantasy / i love tales of magic": "dragons, wizards, elves, enchanted swords, "
            "spells, dark lords, dwarves, prophecies",
            "i watch horror / i enjoy being scared": "zombies, haunted houses, vampires, ghosts, "
            "chainsaws, curses, creepy dolls, graveyards",
            "i read history / i am interested in the past": "ancient rome, kings, castles, old battles, "
            "pharaohs, treaties, knights, crumbling ruins",
            "i love romance / i cry at love stories": "first kisses, secret letters, a handsome duke, "
            "happy endings, jealous rivals, summer flings, moonlit balls, tears",
        },
    ),
}

OPENERS = ("", "", "", "", "", "", "", "", "well ,", "oh ,", "haha ,", "hmm ,", "honestly ,", "you know ,", "to be fair ,",
           "i guess", "let me see ,")  # fmt: skip
CLOSERS = ("", "", "", "", "", "", "", "!", "...", ", you know ?", ", as always", ", really", ", no joke", ", lol",
           ", what about you ?", ", it never gets old")  # fmt: skip
ECHOES = (
    "{word} ? {reply}",
    "{word} , well , {reply}",
    "ah , {word} ! {reply}",
    "{reply} , that is {word} for you",
)
GREETINGS = ("hi , how are you ?", "hello there !", "hey , nice to meet you .", "good evening !",
             "hi ! how is your day ?", "hello , what is up ?")  # fmt: skip
GREETING_REPLIES = ("i am fine , thanks . and you ?", "hey ! pretty good so far .", "hello ! nice to meet you .",
                    "doing well , a bit tired .", "hi ! great , thank you .", "good , good . you ?")  # fmt: skip
REACTIONS = ("", "", "that sounds nice .", "oh wow .", "i see .", "cool !", "good for you .", "interesting .",
             "me too .", "i can imagine .")  # fmt: skip
AGREEMENTS = ("same here ,", "me too ,", "tell me about it ,", "you are not alone ,", "exactly ,")
FOLLOW_UPS = ("really ? tell me more .", "how come ?", "what is that like ?", "and what else ?",
              "oh , go on .", "since when ?")  # fmt: skip
