from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.formats.articles import count_words, split_sentences

# Sentences


@pytest.mark.parametrize(
    "parts",
    [
        ["Is it so?", "It is!", "Good."],
        ["Dr. Smith met Mrs. Jones at St. Paul.", "They left."],
        ["J. R. R. Tolkien wrote it.", "He was English."],
        ["It cost approx. 5 dollars, cf. Fig. 3.", "Then it rose."],
        ["The U.S. Army came, e.g. Gen. Lee.", "It won."],
        ["Das ist so.", "Österreich ist groß.", "Über allem."],
        ["Он был основан.", "Летом в 1990 г. Он приехал.", "«Сейчас!»", "Потом."],
        ["Αυτό είναι.", "Όλα καλά."],
        ["Πού είναι;", "Στην κουζίνα· εκεί.", "Γιατί\u037e", "Έτσι."],
        ["He is tall; Mary is not.", "Armenians: Aram and Ani."],
        ["Որտե՞ղ է թեյնիկը։", "Խոհանոցում է:", "Հարցրու:"],
        ["სად არის ჩაიდანი?", "ის სამზარეულოშია.", "მეზობელს ჰკითხე."],
        ["กาน้ำอยู่ที่ไหน?", "อยู่ในครัว.", "ถามเพื่อนบ้าน."],
        [
            "กรุงเทพมหานครเป็นเมืองหลวง",
            "มีประชากรประมาณ 8 ล้านคน ตั้งอยู่ริมแม่น้ำ",
            "ตลาดนัดขนาดใหญ่ต่าง ๆ เปิดทุกเช้า",
        ],
        ["ວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ", "ຕັ້ງຢູ່ແຄມແມ່ນ້ຳຂອງຕອນກາງ"],
        ["Ærø er en ø.", "Gaula er en å.", "Å. Nilsson bor der."],
        ["ማሰሮው የት ነው?", "በወጥ ቤት ውስጥ ነው።", "እሺ፧", "ደህና።"],
        ["ရေနွေးအိုး ဘယ်မှာလဲ။", "မီးဖိုချောင်မှာ ရှိတယ်။"],
        ["កំសៀវនៅឯណា?", "វានៅក្នុងផ្ទះបាយ។", "សួរអ្នកជិតខាង។"],
        ["Il est là !", "« Oui. »", "Élise partit.", "M. Dupont resta."],
        [
            "Es war am 3. Oktober 1990.",
            "Hunde bzw. Katzen, Nr. 5.",
            "Im 19. Jahrhundert kam Öl z. B.",
        ],
        ["It ended.[1]", "Then it began.[2][3]", "He said no.", "Ever."],
        ["هذا كتاب.", "هل هو جديد؟", "نعم."],
        ["यह एक किताब है।", "वह अच्छी है।"],
        ["¿Qué?", "¡Sí!", "Bien."],
        ['He said "Go away."', '"No," she said.'],
        ["(It was so.)", "(Then it was not.)"],
        ["See Figs. 3 and 4, Eq. 5 in Sec. 6, and pp. 7 to 9.", "It holds."],
        ["He met Capt. Jones on Jan. 5, 1900, and Smith et al. (1990) say so.", "They left."],
        ["Kids like figs.", "They eat no peas.", "They went to Koch'ang.", "It rained."],
        ["См. рис. 3 на стр. 5 в изд. Наука.", "Об этом писал акад. Павлов."],
        ["Он приехал 5 янв. 1900 года на пл. Ленина.", "Вышел том.", "Том 2 вышел позже."],
        ["Київ, вул. Хрещатик.", "Це столиця."],
        ["Эйнштейн (нем. Albert Einstein; ок. 1879) и св. Николай.", "Оз. Байкал."],
        ["Vgl. Abb. 3.", "Der sog. Heilige kam ins ehem. Kloster (lat. Monasterium)."],
        ["Il naquit en 70 apr. J.-C. à Rome.", "Éd. Gallimard."],
        ["It is an edition by eds. Smith and Lee.", "He was red.", "It had a span.", "No."],
        [
            "Die 2. Mannschaft wohnt in der Hauptstr. 5 bei der Fa. Siemens.",
            "Dr. med. Müller ging.",
        ],
        ["Voir chap. 3, p. ex. Foch, le 5 janv. 44 av. J.-C. ici.", "Fin."],
        ["El 5 de ene. en la Avda. Mayor.", "Vive en EE. UU. desde 1990."],
        ["Il sig. Rossi e il dott. Bianchi nel sec. XIX.", "Poi."],
        ["Dit is bijv. Amsterdam, tj. Kraków, TP. Hồ Chí Minh.", "Het is mooi."],
        ["डॉ. शर्मा आए।", "वह गए।"],
        ["It is version 2.0 of it.", "9 more came."],
        ["भारत एक देश है|", "इसकी राजधानी दिल्ली है |", "यह बड़ी है।"],
        ["그는 1990. 3. 1. 태어났다.", "그리고 갔다."],
        ["Er kam am 3. 12. 1990 und am 4. Sept. 1991.", "Der 1. FC Köln gewann."],
        ["Яблоки, груши и т. д.", "Потом он ушёл, т. е. Иван.", "— Куда?", "— Домой."],
        ["It has 3 floors.", "$5 is paid.", "—¿Dónde?", "—Aquí, Dña. María."],
        ["አዲስ፡አበባ፡ዋና፡ከተማ፡ናት፡፡", "ትልቅ፡ናት፡፡"],
        ["ܐܘܪܫܠܡ ܡܕܝܢܬܐ܀", "ܪܒܬܐ܀"],
        ["no capital. so no end."],
        ["Wait... for it."],
        ["one"],
    ],
)
def test_sentences_end_before_a_capital_but_not_after_an_abbreviation(parts):
    assert split_sentences(" ".join(parts)) == parts


@pytest.mark.parametrize("space", ["", " "])
def test_chinese_and_japanese_sentences_need_no_space_between_them(space):
    parts = [
        "今天天气很好。", "我们去公园！", "你来吗？", "彼は「行く。」と言った。", "そして帰った。",
        "他说：“在厨房里。”", "她走了。", "ﾀﾞｲﾄﾞｺﾛ｡", "円周率は３．１４である．", "यह है।",
        "彼は来た（昨日。）。", "ཁོང་གིས་སྒྲུང་གསུམ་བྲིས།", "ᱩᱱᱤ ᱚᱞ ᱟ᱾", "ꯃꯍꯥꯛꯅ ꯏꯏ꯫", "वह नहीं है।",
    ]  # fmt: skip
    assert split_sentences(space.join(parts)) == parts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Go away now.", 3),
        ("今天天气很好我们去公园吧。", 7),
        ("ไปโรงเรียน", 6),
        ("སྒྲུང་གསུམ", 6),
        ("Да, он.", 2),
        ("አዲስ፡አበባ፡ከተማ፡ናት፡፡", 4),
    ],
)
def test_letters_of_scripts_without_spaces_are_counted(text, words):
    assert count_words(text) == words


@given(st.text(st.sampled_from("éЯ字。aA1 .!?\"')]([\nDr")))
def test_sentences_are_the_text_without_a_character_lost(text):
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(part and part == part.strip() for part in found)


def test_a_list_of_initials_is_one_sentence_and_takes_no_square_of_the_time():
    text = "A. " * 50_000
    assert split_sentences(text) == [text.strip()]
