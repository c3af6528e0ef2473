//! NVMe Qualified Names (Base 2.0, 4.5).
//!
//! Two forms: `nqn.yyyy-mm.reverse-domain[:string]` and `nqn.2014-08.org.nvmexpress:uuid:UUID`. At most 223 bytes of UTF-8,
//! sent in a field of 256 bytes that is padded with zero bytes.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The size of an NQN field on the wire, bytes, with at least one terminating NUL.
pub const NQN_FIELD_LEN: usize = 256;
/// The longest NQN in bytes (Base 4.5).
pub const NQN_LEN_MAX: usize = 223;
/// The well known NQN of every discovery subsystem (Base 3.1.2.3).
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// What comes before the UUID in the second form of an NQN.
pub const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A name that has been checked.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Box<str>);

/// Why a name is not an NQN.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NqnError {
    #[error("the NQN is empty")]
    Empty,
    #[error("the NQN is {len} bytes long, at most {NQN_LEN_MAX} are allowed")]
    TooLong { len: usize },
    #[error("the NQN field of {NQN_FIELD_LEN} bytes has no terminating NUL")]
    NotTerminated,
    #[error("the NQN is not valid UTF-8 (byte {at})")]
    NotUtf8 { at: usize },
    #[error("the NQN has a space or control character at byte {at}")]
    Space { at: usize },
    #[error("the NQN does not begin with \"nqn.\"")]
    Prefix,
    #[error("after \"nqn.\" a date yyyy-mm and a dot must follow, found {found:?}")]
    Date { found: String },
    #[error("the month of the NQN's date must be 01 to 12, found {found:?}")]
    Month { found: String },
    #[error("after the date a reverse domain name must follow, found {found:?}: {why}")]
    Domain { found: String, why: &'static str },
    #[error("nothing follows the colon")]
    EmptySuffix,
    #[error("after \"{UUID_PREFIX}\" a UUID must follow, found {found:?}")]
    Uuid { found: String },
}

impl Nqn {
    /// Checks `text` and keeps it as it is: NQNs are compared byte by byte.
    pub fn new(text: &str) -> Result<Nqn, NqnError> {
        check(text)?;
        Ok(Nqn(text.into()))
    }

    /// Checks a field as it stands in Connect data or a log page.
    pub fn from_field(field: &[u8; NQN_FIELD_LEN]) -> Result<Nqn, NqnError> {
        Nqn::new(text_of_field(field)?)
    }

    pub fn discovery() -> Nqn {
        Nqn(DISCOVERY.into())
    }

    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn to_field(&self) -> [u8; NQN_FIELD_LEN] {
        to_field(&self.0)
    }
}

/// The text of an NQN field, unchecked but for its encoding and end.
pub fn text_of_field(field: &[u8; NQN_FIELD_LEN]) -> Result<&str, NqnError> {
    let end = field.iter().position(|&b| b == 0).ok_or(NqnError::NotTerminated)?;
    std::str::from_utf8(&field[..end]).map_err(|e| NqnError::NotUtf8 { at: e.valid_up_to() })
}

/// `text` in a field padded with NULs, cut at the field's end. Does not check it: tests need wrong names too.
pub fn to_field(text: &str) -> [u8; NQN_FIELD_LEN] {
    let mut field = [0; NQN_FIELD_LEN];
    let len = text.len().min(NQN_FIELD_LEN);
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
    field
}

fn check(text: &str) -> Result<(), NqnError> {
    if text.is_empty() {
        return Err(NqnError::Empty);
    }
    if text.len() > NQN_LEN_MAX {
        return Err(NqnError::TooLong { len: text.len() });
    }
    if let Some((at, _)) = text.char_indices().find(|(_, c)| c.is_whitespace() || c.is_control()) {
        return Err(NqnError::Space { at });
    }
    let Some(rest) = text.strip_prefix("nqn.") else { return Err(NqnError::Prefix) };
    if let Some(uuid) = text.strip_prefix(UUID_PREFIX) {
        return check_uuid(uuid);
    }
    let domain = check_date(rest)?;
    let (domain, suffix) = match domain.split_once(':') {
        Some((domain, suffix)) => (domain, Some(suffix)),
        None => (domain, None),
    };
    check_domain(domain)?;
    if suffix == Some("") { Err(NqnError::EmptySuffix) } else { Ok(()) }
}

/// What follows "yyyy-mm.".
fn check_date(rest: &str) -> Result<&str, NqnError> {
    let wrong = || NqnError::Date { found: rest.chars().take(8).collect() };
    let (date, domain) = rest.split_once('.').ok_or_else(wrong)?;
    let (year, month) = date.split_once('-').ok_or_else(wrong)?;
    let digits = |s: &str, n| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(year, 4) || !digits(month, 2) {
        return Err(wrong());
    }
    if !("01"..="12").contains(&month) {
        return Err(NqnError::Month { found: month.into() });
    }
    Ok(domain)
}

/// A reverse domain name: labels of letters, digits, `-` and `_`, parted by dots. A name of one label is let through, as
/// `nqn.2024-01.lab:x` is in wide use.
fn check_domain(domain: &str) -> Result<(), NqnError> {
    let wrong = |why| Err(NqnError::Domain { found: domain.into(), why });
    if domain.is_empty() {
        return wrong("it is missing");
    }
    for label in domain.split('.') {
        if label.is_empty() {
            return wrong("a label is empty");
        }
        if label.len() > 63 {
            return wrong("a label is longer than 63 bytes");
        }
        if label.starts_with('-') || label.ends_with('-') {
            return wrong("a label begins or ends with a hyphen");
        }
        if !label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
            return wrong("a label has a character other than letters, digits, '-' and '_'");
        }
    }
    Ok(())
}

/// 8-4-4-4-12 hexadecimal digits; old Linux hosts also send the 32 digits without hyphens, and firmware may write
/// upper case.
fn check_uuid(text: &str) -> Result<(), NqnError> {
    let dashed = text.len() == 36
        && text
            .bytes()
            .enumerate()
            .all(|(i, b)| if matches!(i, 8 | 13 | 18 | 23) { b == b'-' } else { b.is_ascii_hexdigit() });
    let compact = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if dashed || compact { Ok(()) } else { Err(NqnError::Uuid { found: text.into() }) }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Nqn, NqnError> {
        Nqn::new(text)
    }
}

impl AsRef<str> for Nqn {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for Nqn {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_len(len: usize) -> String {
        let mut text = String::from("nqn.2014-08.com.example:");
        text.extend(std::iter::repeat_n('x', len - text.len()));
        text
    }

    #[test]
    fn legal_names_are_accepted() {
        for text in [
            "nqn.2008-04.org.example.lan.host1",
            "nqn.2016-06.io.spdk:cnode1",
            "nqn.2014-08.com.example:nvme:nvm-subsystem-sn-d78432",
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
            "nqn.2014-08.org.nvmexpress:uuid:F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6",
            "nqn.2014-08.org.nvmexpress:uuid:f81d4fae7dec11d0a76500a0c91e6bf6",
            "nqn.2024-01.lab:größe",
            &of_len(NQN_LEN_MAX),
        ] {
            assert_eq!(Nqn::new(text).map(|n| n.to_string()), Ok(text.to_string()), "{text}");
        }
    }

    #[test]
    fn each_refusal_says_what_is_wrong() {
        let refused = |text: &str| Nqn::new(text).expect_err(text);
        assert_eq!(refused(""), NqnError::Empty);
        assert_eq!(refused(&of_len(224)), NqnError::TooLong { len: 224 });
        assert_eq!(refused("10.0.0.1"), NqnError::Prefix);
        assert_eq!(refused("NQN.2014-08.com.example:x"), NqnError::Prefix);
        assert_eq!(refused("nqn.2014-08.com.example:a b"), NqnError::Space { at: 25 });
        assert!(matches!(refused("nqn.2014-00.com.example:x"), NqnError::Month { .. }));
        assert!(matches!(refused("nqn.2014-13.com.example:x"), NqnError::Month { .. }));
        for date in
            ["nqn.14-08.com.example", "nqn.2014-8.com.example", "nqn.2014.com", "nqn.2014-08", "nqn.x"]
        {
            assert!(matches!(refused(date), NqnError::Date { .. }), "{date}");
        }
        for domain in
            ["nqn.2014-08.", "nqn.2014-08.:x", "nqn.2014-08.com..x", "nqn.2014-08.-a.b", "nqn.2014-08.cöm"]
        {
            assert!(matches!(refused(domain), NqnError::Domain { .. }), "{domain}");
        }
        assert_eq!(refused("nqn.2014-08.com.example:"), NqnError::EmptySuffix);
        for uuid in [
            "",
            "f81d4fae-7dec-11d0-a765",
            "f81d4fae-7dec-11d0-a765-00a0c91e6bfg",
            "f81d4fae7dec-11d0a76500a0c91e6bf6",
        ] {
            let text = format!("{UUID_PREFIX}{uuid}");
            assert!(matches!(refused(&text), NqnError::Uuid { .. }), "{text}");
        }
    }

    #[test]
    fn fields_must_be_terminated_utf8() {
        assert_eq!(Nqn::from_field(&[b'n'; NQN_FIELD_LEN]), Err(NqnError::NotTerminated));
        assert_eq!(Nqn::from_field(&[0; NQN_FIELD_LEN]), Err(NqnError::Empty));
        let mut field = to_field("nqn.2014-08.com.example:");
        field[24] = 0xFF;
        assert_eq!(Nqn::from_field(&field), Err(NqnError::NotUtf8 { at: 24 }));
        let name = Nqn::new("nqn.2014-08.com.example:x").unwrap();
        assert_eq!(Nqn::from_field(&name.to_field()), Ok(name));
    }
}
