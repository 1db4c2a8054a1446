"""Recognises texts that stand in place of a comment and say that it was removed or deleted.

Reddit and moderators put most of them into brackets. Tools that overwrite a person's comments, and bots of
moderators, write sentences. A notice does not ask: a sentence with a question mark is a person's, unless it
goes on as bots do. What people say of a removal ("Your post was removed because the mods are wrong") is text.
"""

from __future__ import annotations

import functools

import pyarrow as pa
import pyarrow.compute as pc

_THING = r"(?:comment|post|content|submission|message|account|user|thread|repl(?:y|ie))s?"
_REMOVED = r"(?:self[- ])?(?:removed|deleted|redacted|overwritten|anonymized)"
_CHANGED = rf"(?:{_REMOVED}|edited|erased|nuked|wiped|purged|censored|withdrawn)"
_WAS = r"(?:has been|have been|was|were|is)"
_OF_SUBREDDIT = r"(?: (?:of|from|in) /?r/\w+)?"
_PERSON = (
    r"(?:(?:the |an? |its? |our )?(?:original )?(?:user|author|auto ?mod|mod|op\b|person|poster|owner)\w*"
    rf"{_OF_SUBREDDIT}(?: who (?:originally )?posted it)?)"
)
_REDDIT = (
    r"(?:reddit|(?:the )?(?:reddit )?admin)\w*(?:'s (?:[\w-]+ ){0,2}(?:filters?|system|team))?"
)
_TOOL = (
    r"(?:redact|shreddit|ereddicator|power ?delete ?suite|nuke ?reddit"
    r"|\[?(?:an?|this) \[?\w+[ -]source script)"
)
_BECAUSE = r"(?:for|because|due to|as|since|per|under|from /?r/)"
# Why moderators remove a comment, in their words.
_FAULT = (
    r"(?:being )?(?:an? )?(?:uncivil\w*|incivility|off[- ]topic|low[- ]effort|spam\w*|troll\w*|harass\w*"
    r"|personal attacks?|hate speech|bigotry|racism|brigading|self[- ]promotion|reposts?|duplicates?"
    r"|misinformation|toxicity|abuse)(?: (?:post|comment|content)s?)?"
)
_RULE = r"\b(?:rule|guideline|moderator|automoderator|flair|karma|url shortener|violat|filter)"
_PROTEST = (
    r"(?:(?:in|as a|out of|to) protest\b|in (?:direct )?response to (?:reddit|spez|the api)"
    r"|to protect (?:my|this user's|the user's|user) privacy)"
)
_ASIDE = r"[\s.,:;()*_>-]+"
_RULE_NAMED = (
    rf"(?:{_ASIDE}(?:(?:(?:for|per|under|reason|violat\w+|breaking)\W+){{0,2}}rules? ?(?:#?\d|:)"
    r"|(?:please )?(?:read|see|review|follow|check) (?:the|our)\b.{0,30}\brules?\b)[^?]*)"
)
# "I am a bot, and this action was performed automatically. Please contact the moderators …"
_AS_A_BOT = (
    r"(?:[^\w?].*\b(?:i am a bot|(?:contact|message|pm) (?:the|us|a) ?mod\w*|mod ?mail)\b.*)"
)
_GREETING = (
    r"(?:(?:(?:hello|hi|hey|greetings|thanks|thank you|(?:i'?m )?sorry|unfortunately|however)\b[^.!?,]*[.!?,]"
    r"|/?u/[\w-]+\s*[.!?,:–-]|please read this entire message\W)\W*(?:but )?)"
)
_WAS_REMOVED = rf"{_WAS} (?:automatically )?{_REMOVED}{_OF_SUBREDDIT}"
_WITH_A_RULE = rf"(?: (?:by {_PERSON} )?{_BECAUSE}\b[^?]*{_RULE}[^?]*)"

_ENGLISH = (
    # [ Removed by Reddit on account of violating the [content policy](/help/…). ]; [removed] Rule 2
    rf"\[\s*(?:(?:this|the|your) )?(?:{_THING} |(?:link|image|picture|photo|video|url) )?(?:{_WAS} )?"
    rf"(?:{_REMOVED}|unavailable|censored)"
    r"(?:\s*\]|\W*\b(?:by|using|via|with|in|on|to|for|from (?:/?r/|reddit|this)|at|as|per|under|due|because"
    rf"|after|since|this|rule|see|along|{_FAULT})\b(?:[^\[\]]|\[[^\[\]]*\])*\]){_RULE_NAMED}?",
    rf"\[\s*{_REMOVED} {_THING}\s*\]",
    # Removed, (comment deleted), \[removed\], deleted by user; removed, rule 2
    rf"\\?[\[({{<]*\s*(?:edit ?: ?)?(?:{_THING} )?{_REMOVED}(?: by (?:{_PERSON}|{_REDDIT}|{_TOOL}))?"
    r"\s*\\?[\])}>]*",
    rf"(?:{_THING} )?{_REMOVED}[*_]*(?:\s?[.,:;-]|\s{_BECAUSE})[*_]*"
    r"\s?(?:\w+ ){0,2}rules? #?(?:\d.*|[IVX]+)",
    rf"\[\s*{_CHANGED}\s*\]|\(?rules? #?\d+\)?\s?[-.:,]?\s?{_REMOVED}|{_REMOVED} \(rules? #?\d+[^?]*\)"
    rf"|locked and {_REMOVED}|\[?(?:comment )?(?:chain|thread)s? (?:{_REMOVED}|nuked|wiped)\]?",
    rf"(?:your {_THING} was )?(?:{_THING} )?{_REMOVED}(?:\s?[:-]| for)\s?{_FAULT}",
    rf"(?:this |the )?user (?:has )?{_CHANGED} (?:(?:this|the|their|his|her) )?(?:comment|post|content)s?"
    rf"(?: {_PROTEST}[^?]*)?",
    # [deleted] ^^^0.1019 [^^^What ^^^is ^^^this?](https://pastebin.com/…)
    r"\[?deleted\]?[\s^]+[\d.]*\s*\[?\W*what\W+is\W+this\W*(?:\(https?://[^)]*\))?",
    # Comment removed by moderator. Rule 3; deleted in protest; edited with Power Delete Suite
    rf"\[?(?:(?:this )?{_THING} )?(?:{_WAS} (?:\w+ )?)?{_CHANGED} (?:by {_PERSON}\b[^?.]{{0,30}} )?"
    rf"{_PROTEST}[^?]*",
    rf"(?:this )?{_THING} {_WAS} {_REMOVED},? along with (?:its|my|the) account\b[^?]*",
    r"(?:this )?user (?:has )?deleted their account",
    rf"(?:(?:this )?{_THING} )?(?:{_WAS} (?:\w+ )?)?{_REMOVED}(?: and (?:the |my )?{_THING} {_REMOVED})?"
    r" (?:due to|because of) (?:reddit|(?:the )?api|spez)\b[^?]*",
    rf"i(?:'ve| have)? {_CHANGED} [^?.]*{_THING} [^?.]*{_PROTEST}[^?]*\b(?:api|reddit)\b[^?]*",
    rf"(?:this |(?:the )?original )?{_THING} (?:{_WAS} (?:\w+ )?)?(?:{_REMOVED}|erased)",
    rf"(?:this |(?:the )?original )?{_THING} (?:{_WAS} (?:\w+ )?)?{_REMOVED}(?: -)? \(?by {_PERSON}"
    rf"(?:{_RULE_NAMED}|{_WITH_A_RULE}|{_AS_A_BOT})?",
    rf"{_GREETING}?(?:(?:this )?{_THING} (?:{_WAS} (?:\w+ )?)?)?{_REMOVED}(?: -)? \(?by {_REDDIT}"
    rf"(?: (?:in response to|on account of|{_BECAUSE})\b[^?]*|{_RULE_NAMED})?",
    rf"(?:this |(?:the )?original )?{_THING} (?:{_WAS} (?:\w+ )?)?{_CHANGED}(?: -)? (?:by {_PERSON} )?"
    rf"\(?(?:by|using|with|via) {_TOOL}\b.*",
    r".*\bmass (?:deleted|edited)(?: all reddit content via|/edited| (?:from|with|and anonymized with)"
    r" \W*(?:https://)?(?:www\.)?red(?:dit|act))\b.*",
    # The wording of Redact changes: "The content here was permanently deleted. Redact was used to remove it."
    r"[^?]*\bredact was used (?:by|to|for)\b[^?]*",
    rf"(?:this|the)\b[^?.]{{0,40}}\b(?:post|comment|content|message)\b[^?.]{{0,40}}\b{_CHANGED}\b[^?.]{{0,40}}"
    r"\b(?:with|using|via|by) \W*redact\b[^?]*",
    r"(?:edited|overwritten|(?:this )?\w+ (?:was|has been) archived) (?:with|using|via|by) "
    r"(?:power ?delete ?suite|nuke reddit(?: history)?|an automated script)\b[^?]*",
    r"this comment has been edited and (?:the )?original content overwritten",
    # Hello, your post has been removed because it breaks rule 2.
    rf"{_GREETING}+this {_THING} {_WAS} (?:locked and )?{_REMOVED} by {_PERSON}",
    rf"this {_THING} {_WAS} (?:locked and|nuked|wiped)(?: {_REMOVED})? by {_PERSON}",
    rf"{_GREETING}*this (?:{_THING} )?{_WAS_REMOVED}"
    rf"(?: by {_PERSON})?(?:{_WITH_A_RULE}|{_RULE_NAMED}|{_AS_A_BOT})",
    rf"{_GREETING}*(?:unfortunately\b,?|thank(?:s| you) for (?:your|submitting|posting)\b[^.!?]*,)"
    rf"\s*(?:but )?it {_WAS_REMOVED}(?:{_WITH_A_RULE}|{_RULE_NAMED}|{_AS_A_BOT})",
    rf"{_GREETING}*(?:we|i)(?:'ve| have)? (?:removed|had to remove) (?:your|this) {_THING}"
    rf"(?:{_WITH_A_RULE}|{_RULE_NAMED}|{_AS_A_BOT})",
    rf"(?:this|your) {_THING} (?:breaks|broke|violates|violated)\b[^?.]{{0,60}} and {_WAS_REMOVED}",
    rf"{_GREETING}*this {_WAS_REMOVED} by {_PERSON}",
    rf"{_GREETING}*your {_THING}{_OF_SUBREDDIT} {_WAS_REMOVED}"
    rf"(?: by {_PERSON})?(?:{_WITH_A_RULE}|{_RULE_NAMED}|{_AS_A_BOT})?",
    rf"{_GREETING}*your {_THING} (?:has been (?:automatically )?|(?:was|were) automatically ){_REMOVED}"
    rf" {_BECAUSE}\b[^?]*",
    rf"{_GREETING}+your {_THING} {_WAS_REMOVED} {_BECAUSE}:[^?]*",
)  # fmt: skip

# In other languages a notice is brackets, or a sentence, with nothing but these words.
_REMOVED_ABROAD = (
    r"(?:entfernt|gelöscht|supprimée?|retirée?|effacée?|eliminad[oa]|borrad[oa]|removid[oa]|apagad[oa]|excluíd[oa]"
    r"|rimosso|eliminato|cancellato|verwijderd|usunięt[aoey]|odstraněn[oa]?|borttagen|raderad|fjernet|slettet"
    r"|poistettu|уда[лл][её]н[ао]?|видален[ои]?|премахнат[оа]?|изтрит[оа]?|silindi|kaldırıldı|törölve"
    r"|deletad[oa]|borttaget|raderat|smazán[oa]?|izbrisano|obrisano|șters|διαγράφηκε|נמחק|đã xóa|dihapus|ถูกลบ"
    r"|हटाया गया)"
)
_THING_ABROAD = (
    r"(?:(?:dieser|dieses|diese|der|die|das|ces?|cette|cet|le|este|esta|el|la|o|questo|il|deze|dit|ten|ta|этот|это"
    r"|цей|bu|den här|denne) )?"
    r"(?:kommentar|beitrag|inhalt|nachricht|commentaire|message|contenu|publication|comentario|mensaje"
    r"|publicación|comentário|mensagem|commento|messaggio|reactie|bericht|komentarz|post|комментарий|сообщение|пост|коментар"
    r"|yorum|innlegg|inlägg)"
)
_WAS_ABROAD = (
    r"(?:wurde|ist|war|a été|est|ha sido|fue|foi|è stat[oa]|is|werd|został[ao]?|er|был[оа]?|було)"
)
_BY_ABROAD = (
    r"(?:(?:von|vom|durch|par|por|pelo|pela|da|dal|door|przez|av|af|от) )?"
    r"(?:(?:(?:einem|einer|den|dem|une?|le|la|el|los|un|o|um|de|een|il) )|l')?"
    r"(?:reddit|mod[eé]r[^\s\]]*|autor[^\s\]]*|auteur[^\s\]]*|utilisateur|usu[aá]rio|utente|nutzer|gebruiker|użytkownik[^\s\]]*"
    r"|модератор[^\s\]]*|автор[^\s\]]*|пользовател[^\s\]]*|адм[иі]н[^\s\]]*)"
)
_ABROAD = (
    rf"\[\s*(?:{_THING_ABROAD} )?(?:{_WAS_ABROAD} )?(?:{_BY_ABROAD} )?{_REMOVED_ABROAD}"
    rf"(?: {_BY_ABROAD})?\s*\]",
    rf"{_THING_ABROAD} (?:{_WAS_ABROAD} )?(?:{_BY_ABROAD} )?{_REMOVED_ABROAD}(?: {_BY_ABROAD})?",
    rf"{_BY_ABROAD} {_REMOVED_ABROAD}|{_REMOVED_ABROAD} {_BY_ABROAD}|gelöscht|entfernt|supprimé|удал[её]но",
    r"[\[【]?(?:该|此|本)?(?:评论|評論|回复|回覆|帖子|内容|內容|留言)?(?:已经?)?被?(?:版主|管理员|作者|用户)?"
    r"(?:[删刪]除|移除)[\]】]?",
    r"[\[【]?(?:この)?(?:コメント|投稿|メッセージ)?は?(?:モデレーターによって|投稿者によって|投稿者により)?"
    r"削除(?:されました|済み|されています)[\]】]?|[\[【]削除[\]】]",
    r"\[?(?:이 )?(?:댓글|게시물|글)?[이은]? ?(?:삭제되었습니다|삭제됨|삭제된 (?:댓글|게시물)입니다)\]?",
    r"\[?تم (?:ال)?(?:حذف|إزالة)(?: هذا)?(?: التعليق| المنشور)?(?: (?:من قبل|بواسطة) \pL+)?\]?",
)  # fmt: skip

_KNOWN = pa.array(["[deleted]", "[removed]"])
# A word that each other notice has. One by one, because RE2 takes ten times as long for all notices in one.
_WORD_ABROAD = rf"(?i)(?:{_REMOVED_ABROAD}|[删刪]除|移除|削除|삭제|تم (?:ال)?(?:حذف|إزالة))"
_WORD = rf"(?i)(?:{_CHANGED}|had to remove|unavailable|redact|archived)|{_WORD_ABROAD}"
_NOTICES, _NOTICES_ABROAD = (
    [
        rf"(?is)^(?:[\s*_~^>`#.-]|&[gl]t;)*(?:{notice})(?:[\s*_~.!`。-]|\x{{200b}}|&#x200b;|&gt;)*$"
        for notice in notices
    ]
    for notices in (_ENGLISH, _ABROAD)
)


def is_notice(texts: pa.Array) -> pa.Array:
    """Whether each text says in place of a comment that there was one."""
    is_known = pc.is_in(texts, _KNOWN)
    may_be = pc.and_not(pc.match_substring_regex(texts, _WORD), is_known)
    few = pc.filter(texts, may_be)
    is_abroad = pc.any(pc.match_substring_regex(few, _WORD_ABROAD)).as_py()
    matches = (
        pc.match_substring_regex(few, notice)
        for notice in (*_NOTICES, *(_NOTICES_ABROAD if is_abroad else ()))
    )
    return pc.replace_with_mask(is_known, may_be, functools.reduce(pc.or_, matches))
