"""Strings that want to be obeyed, or to break a layout: for tests of what draws remote text (S19, S20)."""

from __future__ import annotations

from itertools import product

MARK = "QXJ"
"""Follows each control in the corpus; nothing that a client draws may have that control right before it."""

CONTROLS = [chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0))]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
SEQUENCES = [
    # Titles, clipboards, links, pictures, notifications and colors by OSC; ended by BEL, by ST, by C1's ST, or never.
    *[
        f"\x1b]{start}{MARK}{end}"
        for start, end in product(
            (
                "0;",
                "2;",
                "4;1;",
                "7;file://",
                "8;;http://",
                "9;",
                "10;",
                "52;c;",
                "52;p;",
                "133;A",
                "777;notify;",
                "1337;File=",
            ),
            ("\x07", "\x1b\\", "\x9c", ""),
        )
    ],
    # CSI: erasing, moving, coloring, modes, reports and answers that would be typed for the person.
    *[
        f"{csi}{before}{MARK}{after}"
        for csi, (before, after) in product(
            ("\x1b[", "\x9b"),
            (
                ("2J", ""),
                ("31m", "\x1b[0m"),
                ("", "n"),
                ("?1049h", ""),
                ("?2004l", ""),
                ("200~", "\x1b[201~"),
                ("6n", ""),
                ("c", ""),
                ("21t", ""),
                ("1;1H", ""),
                ("999;999H", ""),
                ("?25l", ""),
                ("3J", ""),
                (">4;2m", ""),
                ("?1000h", ""),
                ("!p", ""),
                ("38;2;1;2;3m", ""),
                ("1;1r", ""),
                ("", ""),
            ),
        )
    ],
    # DCS, SOS, PM, APC, and single escapes.
    *[
        f"{start}{MARK}{end}"
        for start, end in product(("\x1bP", "\x1bX", "\x1b^", "\x1b_G", "\x90", "\x9d0;"), ("\x1b\\", "\x9c"))
    ],
    f"\x1bP+q{MARK}\x1b\\",
    f"\x1bPtmux;\x1b\x1b]52;c;{MARK}\x07\x1b\\",
    *[
        f"\x1b{final}{MARK}"
        for final in ("c", "7", "8", "D", "E", "M", "N", "O", "Z", "=", ">", "#8", "(0", "%G", "\x1b[")
    ],
    f"\r{MARK}",
    f"\b\b\b{MARK}",
    f"\x0e{MARK}\x0f",
]
MARKUP = [
    "[/foo]",
    "[/]",
    "[bold]x",
    "[bold]x[/bold]",
    "[@click=app.quit]go[/]",
    "[@click='app.bell()']x[/]",
    "[@click=app.command('erase')]x[/]",
    "[@click=screen.dismiss]x[/]",
    "[link=file:///etc/passwd]x[/link]",
    "[link='https://example.com']x",
    "[$primary]x[/]",
    "[on $error]x[/]",
    "[[[[",
    "]]]]",
    "\\[x\\]",
    "[red on blue]x[/red on blue]",
    "[not a style !!]x[/]",
    "[#gggggg]x",
    "[reverse blink]x",
    ":smile: :warning:",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java&#10;script:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](vbscript:x)",
    "[a](file:///x)",
    "[a](http://h/%1b%5b31m)",
    "[a](http://h/\u202egpj.exe)",
    "![a](http://h/')",
    "[a](<http://h/') app.quit('>)",
    '[a](http://h/"onclick=x)',
    "[a]: javascript:x\n\n[a]",
    "[a]: http://h/[/]\n\n[a]",
    "<script>x</script>",
    "<a href='x'>y</a>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "<![CDATA[",
    "&#27;[31m",
    "&#x9b;31m",
    "&#0;&#xFFFFFF;&#xD800;",
    "&lt;b&gt;",
    "|a|b|\n|-|-|\n|[/x]|`[/]`|",
    "|a|\n|-|\n|\\||||||",
    "# [/h]",
    "[/h]\n====",
    "```[/lang]\n[/code]\n```",
    "```\x1b[31m\ncode\n```",
    "~~~\n[@click=x]",
    "    [bold]indented",
    "**[/b]**",
    "~~[/s]~~",
    "`[/]`",
    "<http://[::1>",
    "http://[x",
    "www.example.com/[/]",
    "mailto:[/]@example.com",
    "{{x}} {x} %s $x {0.__class__}",
    "%(x)s %n ${IFS}",
    "\\",
    "\\\\\\",
    "/quit",
    "/erase",
    "@/etc/passwd",
    "!ls",
    "^[0m",
    "$" * 20,
    '{"type": "error"}',
    "\ud800 \udfff",
]
BOMBS = [
    "> " * 300 + "x",
    "- " * 120 + "x",
    "1. " * 60,
    "".join(" " * (2 * n) + f"- {n}\n" for n in range(60)),
    "[" * 400,
    "![" * 200,
    "[a](" * 200,
    "*" * 600,
    "*a _b " * 150,
    "_" * 99 + "x" + "*" * 99,
    "`" * 199,
    "`a``b```" * 50,
    "#" * 40,
    "=" * 300,
    "-" * 300,
    "|" * 300,
    "|" + "a|" * 120 + "\n|" + "-|" * 120 + "\n|" + "b|" * 120,
    "|a|b|\n|-|-|\n" + "|x|y|\n" * 60,
    "|" + "long word " * 40 + "|x|\n|-|-|\n|y|" + "z" * 400 + "|",
    "<" * 300,
    "&" * 300,
    "\\" * 301,
    "~" * 99,
    "```" * 33,
    "```\n" * 9,
    "x" * 5000,
    "x " * 2500,
    "日" * 2500,
    "\t" * 400,
    "a\tb\t日\tc" * 30,
    " " * 3000 + "x",
    "\n" * 200 + "x",
    "9" * 400 + ". x",
    "999999999. x\n1000000000. y",
    "http://h/" + "a" * 2000,
    "a@b." * 200,
    "\n".join(f"[{n}]: http://h/{n}" for n in range(60)),
    "```\n" + "\t日\x1b[31m" * 200 + "\n```",
    "# " * 200,
    "- [ ] " * 60,
]
WIDE = [
    "日本語" * 20,
    "ｆｕｌｌ" * 20,
    "👩‍👩‍👧‍👦" * 9,
    "👍🏽👍🏿" * 9,
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿" * 5,
    "🇩🇪🇫" * 9,
    "1️⃣*️⃣#️⃣" * 5,
    "☃️☃︎" * 9,
    "❤️‍🔥" * 9,
    "e" + "\u0301" * 80,
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "\u1100\u1161\u11a8" * 20,
    "क्षि" * 20,
    "ﷺ" * 9,
    "꧁༺༻꧂" * 9,
    "\u200b" * 50,
    "\u200d" * 50,
    "\u2060\u00ad" * 30,
    "\ufeff",
    "\ufffe\uffff",
    "\U000e0041" * 9,
    "\U0010ffff" * 9,
    "\ue000" * 9,
    "\u0300 starts with a mark",
    "שלום عالم" * 9,
    "　x　",
    "\u2028a\u2029b\u0085c",
    "\u2800" * 20,
    "ｱﾞ" * 20,
    "\u3164" * 20,
]
PLACES = ("{}", "text {}", "`{}`", "```\n{}\n```", "[{}](http://h)", "|a|\n|-|\n|{}|", "# {}", "- {}")
"""Where Markdown puts a control."""

CORPUS = list(
    dict.fromkeys(
        [
            *[place.replace("{}", f"{control}{MARK}") for place, control in product(PLACES[:5], [*CONTROLS, *BIDI])],
            *SEQUENCES,
            *[place.replace("{}", sequence) for place in PLACES[2:] for sequence in SEQUENCES[::9]],
            *MARKUP,
            *BOMBS,
            *WIDE,
        ]
    )
)
"""All of them, each once."""
