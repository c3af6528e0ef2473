//! Looking at text: Rust source cut into code, comments and literals, and what Markdown pages link to.
//!
//! No parser: what the rules need is to know whether a word stands in code, in a comment or in a literal.

/// What a byte of Rust source belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    Code,
    Comment,
    Literal,
}

/// The class of every byte of Rust source.
pub fn classify(text: &str) -> Vec<Class> {
    let bytes = text.as_bytes();
    let mut classes = vec![Class::Code; bytes.len()];
    let mut at = 0;
    while at < bytes.len() {
        let (class, end) = token(bytes, at);
        classes[at..end].fill(class);
        at = end;
    }
    classes
}

/// The token at `at`: its class and its end.
fn token(bytes: &[u8], at: usize) -> (Class, usize) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        let len = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        return (Class::Comment, at + len);
    }
    if rest.starts_with(b"/*") {
        let mut depth = 0;
        for i in 0..rest.len() {
            depth += i32::from(rest[i..].starts_with(b"/*"));
            if rest[i..].starts_with(b"*/") {
                depth -= 1;
                if depth == 0 {
                    return (Class::Comment, at + i + 2);
                }
            }
        }
        return (Class::Comment, bytes.len());
    }
    let in_word = at > 0 && is_word(bytes[at - 1]);
    if let Some(len) = raw_string(rest).filter(|_| !in_word) {
        return (Class::Literal, at + len);
    }
    match rest[0] {
        b'"' => (Class::Literal, at + quoted(rest)),
        // A character, not a lifetime: '\…' or any one character between quotes.
        b'\'' if rest.get(1) == Some(&b'\\') => (Class::Literal, at + quoted(rest)),
        b'\'' => {
            let close = (2..=5).find(|i| rest.get(*i) == Some(&b'\''));
            match close.filter(|close| is_one_char(&rest[1..*close])) {
                Some(close) => (Class::Literal, at + close + 1),
                None => (Class::Code, at + 1),
            }
        }
        _ => (Class::Code, at + 1),
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn is_one_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| text.chars().count() == 1)
}

/// Length of the literal that begins with a quote and ends with the same one.
fn quoted(rest: &[u8]) -> usize {
    let mut i = 1;
    while i < rest.len() && rest[i] != rest[0] {
        i += if rest[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(rest.len())
}

/// Length of a raw string, `r"…"`, `br"…"` or with any number of `#`.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let start = usize::from(rest[0] == b'b');
    let hashes = rest.get(start + 1..)?.iter().take_while(|b| **b == b'#').count();
    if rest.get(start) != Some(&b'r') || rest.get(start + 1 + hashes) != Some(&b'"') {
        return None;
    }
    let open = start + 1 + hashes + 1;
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    let end = rest[open..].windows(close.len()).position(|window| window == close);
    Some(end.map_or(rest.len(), |end| open + end + close.len()))
}

/// The text with every byte of other classes blanked, line breaks kept.
pub fn only(text: &str, class: Class) -> String {
    let kept = classify(text).into_iter().zip(text.bytes());
    let bytes = kept.map(|(found, byte)| if found == class || byte == b'\n' { byte } else { b' ' });
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// Where `word` stands as a whole word, as byte offsets.
pub fn find_word<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = text[..*at].bytes().next_back().is_some_and(is_word);
        let after = text[at + word.len()..].bytes().next().is_some_and(is_word);
        let (first, last) = (word.as_bytes()[0], word.as_bytes()[word.len() - 1]);
        !(before && is_word(first) || after && is_word(last))
    })
}

/// The line of a byte offset, from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// The identifier at the start of `text`.
pub fn identifier(text: &str) -> &str {
    &text[..text.bytes().take_while(|b| is_word(*b)).count()]
}

/// Lines of a Markdown page outside of fenced blocks, numbered from 1.
fn prose(page: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (i, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((i + 1, line));
        }
    }
    lines
}

/// The links of a Markdown page, pictures included, as (line, target).
pub fn links(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(page) {
        // What is between backticks is no link.
        let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
        for (at, _) in text.match_indices("](") {
            let target = &text[at + 2..];
            if let Some(end) = target.find(')') {
                found.push((number, target[..end].to_owned()));
            }
        }
    }
    found
}

/// The words between backticks in the prose of a Markdown page, as (line, text).
pub fn code_spans(page: &str) -> Vec<(usize, &str)> {
    prose(page)
        .into_iter()
        .flat_map(|(number, line)| line.split('`').skip(1).step_by(2).map(move |span| (number, span)))
        .collect()
}

/// The anchors that the headings of a Markdown page make.
pub fn anchors(page: &str) -> Vec<String> {
    let headings = prose(page).into_iter().filter(|(_, line)| line.starts_with('#'));
    headings
        .map(|(_, line)| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

#[test]
fn source_is_cut_into_code_comments_and_literals() {
    let source =
        "let a: &'a str = \"x // \\\" y\"; // unsafe\nlet c = '\"'; /* a /* b */ c */ let r = r#\"q\"#;\n";
    let (code, comments) = (only(source, Class::Code), only(source, Class::Comment));
    assert!(
        code.contains("let a: &'a str =") && code.contains("let c =") && code.contains("let r ="),
        "{code}"
    );
    assert!(!code.contains("unsafe") && !code.contains('y') && !code.contains('q') && !code.contains('b'));
    assert!(comments.contains("// unsafe") && comments.contains("/* a /* b */ c */"));
    assert_eq!(code.lines().count(), 2);
}

#[test]
fn words_are_whole_words() {
    let found = |text, word| find_word(text, word).count();
    assert_eq!(
        (found("unsafe {", "unsafe"), found("unsafe_code", "unsafe"), found("an_unsafe", "unsafe")),
        (1, 0, 0)
    );
    assert_eq!(found("todo!() xtodo!()", "todo!"), 1);
}

#[test]
fn links_and_anchors_are_found() {
    let page =
        "# The `big` Heading\nsee [a](b.md#x), ![p](c.png) but not `[q](r)`\n```\n[no](no)\n# no\n```\n";
    assert_eq!(links(page), [(2, "b.md#x".to_owned()), (2, "c.png".to_owned())]);
    assert_eq!(anchors(page), ["the-big-heading"]);
    assert_eq!(code_spans("a `b/c` d\n"), [(1, "b/c")]);
}
