//! The forms of the names that come in over the control socket.
//!
//! Checked here, at the border, so that what lies below can rely on them. Each check says in one phrase what is
//! wrong, for `data.reason` of the answer.
#![forbid(unsafe_code)]

use uuid::Uuid;

/// The longest name of a pool, volume or snapshot, in bytes.
pub const NAME_BYTES_MAX: usize = 223;
/// The longest NQN, in bytes (NVMe Base 2.0, section 4.5).
pub const NQN_BYTES_MAX: usize = 223;

/// Text for people and paths: 1 to `max` bytes, no control characters.
pub fn text(value: &str, max: usize) -> Result<(), String> {
    if value.is_empty() {
        return Err("must not be empty".to_owned());
    }
    if value.len() > max {
        return Err(format!("is {} bytes long, at most {max} are allowed", value.len()));
    }
    if value.chars().any(char::is_control) {
        return Err("must not hold control characters".to_owned());
    }
    Ok(())
}

/// Printable ASCII, as NVMe's own ASCII fields are.
pub fn ascii(value: &str, max: usize) -> Result<(), String> {
    text(value, max)?;
    if value.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        Ok(())
    } else {
        Err("must be printable ASCII".to_owned())
    }
}

/// The name of something in a pool, or of a pool or device.
pub fn name(value: &str) -> Result<(), String> {
    text(value, NAME_BYTES_MAX)?;
    if !value.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        return Err("must begin with a letter or digit".to_owned());
    }
    match value.chars().find(|c| !c.is_ascii_alphanumeric() && !"._:@+-".contains(*c)) {
        Some(bad) => Err(format!("must not hold {bad:?}; letters, digits and . _ : @ + - are allowed")),
        None => Ok(()),
    }
}

/// What names an existing volume or snapshot: `NAME`, `POOL/NAME` or a UUID (which is a name by its form).
pub fn node(value: &str) -> Result<(), String> {
    match value.split_once('/') {
        Some((pool, node)) => name(pool).and_then(|()| name(node)),
        None => name(value),
    }
}

/// An NVMe qualified name: `nqn.yyyy-mm.reversed.domain`, optionally `:` and any text, or the UUID form.
pub fn nqn(value: &str) -> Result<(), String> {
    const UUID_FORM: &str = "nqn.2014-08.org.nvmexpress:uuid:";
    text(value, NQN_BYTES_MAX)?;
    if value.chars().any(char::is_whitespace) {
        return Err("must not hold white space".to_owned());
    }
    if let Some(uuid) = value.strip_prefix(UUID_FORM) {
        return match Uuid::try_parse(uuid) {
            Ok(_) if uuid.len() == 36 => Ok(()),
            _ => Err(format!("must be a UUID after {UUID_FORM}")),
        };
    }
    let Some(rest) = value.strip_prefix("nqn.") else {
        return Err("must begin with nqn., as in nqn.2014-08.org.example:host1".to_owned());
    };
    let (date, rest) = rest.split_at_checked(7).ok_or("must have a date yyyy-mm after nqn.")?;
    let month = date.get(5..).and_then(|month| month.parse::<u8>().ok());
    let year_is_digits = date.get(..4).is_some_and(|year| year.bytes().all(|byte| byte.is_ascii_digit()));
    if !year_is_digits || date.as_bytes()[4] != b'-' || !month.is_some_and(|month| (1..=12).contains(&month)) {
        return Err("must have a date yyyy-mm after nqn.".to_owned());
    }
    let (domain, user) = match rest.split_once(':') {
        Some((domain, user)) => (domain, Some(user)),
        None => (rest, None),
    };
    let domain = domain.strip_prefix('.').ok_or("must have a reversed domain name after the date")?;
    for label in domain.split('.') {
        let letters = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if label.is_empty() || label.len() > 63 || !letters || label.starts_with('-') || label.ends_with('-') {
            return Err(format!("{domain:?} is not a reversed domain name"));
        }
    }
    if user == Some("") {
        return Err("must have text after the colon".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legal_nqns_are_taken() {
        let longest = format!("nqn.2014-08.org.example:{}", "x".repeat(223 - 24));
        for good in [
            "nqn.2008-04.org.example.lan.host1",
            "nqn.2016-06.io.spdk:cnode1",
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.2014-08.org.nvmexpress:uuid:8b1e1c4a-1f5e-4d9a-9d0e-3a3a7a7d7b11",
            "nqn.2014-08.org.example:größe",
            &longest,
        ] {
            assert_eq!(nqn(good), Ok(()), "{good}");
        }
    }

    #[test]
    fn other_nqns_are_refused_with_a_reason() {
        let long = format!("nqn.2014-08.org.example:{}", "x".repeat(224 - 24));
        assert_eq!(long.len(), 224);
        for (bad, word) in [
            ("", "empty"),
            ("10.0.0.1", "nqn."),
            ("not-an-nqn", "nqn."),
            ("nqn.2014-08.org.example:a b", "white space"),
            ("nqn.2014-08.örg.example", "domain"),
            ("nqn.2014-13.org.example", "date"),
            ("nqn.20x4-08.org.example", "date"),
            ("nqn.ééé.x", "date"),
            ("nqn.2014-08", "domain"),
            ("nqn.2014-08.", "domain"),
            ("nqn.2014-08.org..example", "domain"),
            ("nqn.2014-08.-org", "domain"),
            ("nqn.2014-08.org.example:", "colon"),
            ("nqn.2014-08.org.nvmexpress:uuid:12", "UUID"),
            (&long, "224 bytes"),
        ] {
            let reason = nqn(bad).expect_err(bad);
            assert!(reason.contains(word), "{bad}: {reason}");
        }
    }

    #[test]
    fn names_keep_to_their_letters() {
        for good in ["v", "0", "vol@step-1000", "a.b_c:d+e", &"x".repeat(223)] {
            assert_eq!(name(good), Ok(()), "{good}");
        }
        for bad in ["", "@a", "-a", "a/b", "a b", "é", "a\u{1}", "a\"", &"x".repeat(224)] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert_eq!(node("pool/vol@s"), Ok(()));
        for bad in ["pool/", "/vol", "a/b/c"] {
            assert!(node(bad).is_err(), "{bad}");
        }
    }
}
