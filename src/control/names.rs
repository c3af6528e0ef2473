//! The forms of the names that come in over the control socket.
//!
//! Checked here, at the border, so that what lies below can rely on them. Each check says in one phrase what is
//! wrong, for `data.reason` of the answer.
#![forbid(unsafe_code)]

use crate::nvme::nqn::Nqn;

/// The longest name of a pool, volume or snapshot, in bytes.
pub const NAME_BYTES_MAX: usize = 223;

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

/// An NVMe qualified name, of a subsystem or a host.
pub fn nqn(value: &str) -> Result<(), String> {
    Nqn::new(value).map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_nqns_of_the_field_are_taken_or_refused_with_a_reason() {
        assert_eq!(nqn("nqn.2008-04.org.example.lan.host1"), Ok(()));
        let long = format!("nqn.2014-08.org.example:{}", "x".repeat(224 - 24));
        for bad in ["10.0.0.1", "", "nqn.2014-08.org.example:a b", "nqn.2014-08.örg.example", &long] {
            assert!(nqn(bad).is_err_and(|reason| !reason.is_empty()), "{bad}");
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
