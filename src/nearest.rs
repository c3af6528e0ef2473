//! The nearest known word to a mistyped one, for messages such as "unknown key `listn`; did you mean `listen`?".
//!
//! Owns nothing and remembers nothing: a pure function over its arguments.
#![forbid(unsafe_code)]

/// The candidate closest to `word`, or `None` when nothing is close enough to be what was meant.
///
/// Close enough is at most a third of the longer word wrong (and at least one letter right): `vol` does not
/// suggest `nqn`, `volmue` suggests `volume`.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = word.to_ascii_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (distance(&wanted, candidate), candidate))
        .filter(|(wrong, candidate)| {
            let longer = wanted.chars().count().max(candidate.chars().count());
            *wrong <= longer.div_ceil(3) && *wrong < longer
        })
        .min_by_key(|(wrong, _)| *wrong)
        .map(|(_, candidate)| candidate)
}

/// Edit distance with insertions, deletions, replacements and swaps of neighbours, each costing one.
fn distance(left: &str, right: &str) -> usize {
    // A word longer than any name we know is not worth a table of its size.
    const LONGEST: usize = 64;
    let left: Vec<char> = left.chars().take(LONGEST).collect();
    let right: Vec<char> = right.chars().take(LONGEST).collect();
    let mut before_last = vec![0; right.len() + 1];
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for i in 1..=left.len() {
        let mut row = vec![i; right.len() + 1];
        for j in 1..=right.len() {
            let replace = last[j - 1] + usize::from(left[i - 1] != right[j - 1]);
            row[j] = replace.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 5] = ["listen", "volume", "nqn", "snapshot", "devices"];

    #[test]
    fn typing_mistakes_find_their_word() {
        for (typed, meant) in [
            ("listn", "listen"),
            ("volmue", "volume"),
            ("Volume", "volume"),
            ("device", "devices"),
            ("snpashot", "snapshot"),
        ] {
            assert_eq!(nearest(typed, KEYS), Some(meant), "{typed}");
        }
    }

    #[test]
    fn a_foreign_word_finds_nothing() {
        for typed in ["", "x", "zebra", "a-very-long-word-that-means-nothing-here"] {
            assert_eq!(nearest(typed, KEYS), None, "{typed}");
        }
    }
}
