//! Sizes as people write them: `4096`, `64KiB`, `10G`, `1.5TB`.

#![forbid(unsafe_code)]

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("'{text}' is not a size: expected a number and a unit, such as 512MiB, 10GiB or 1TB")]
    NotANumber { text: String },
    #[error(
        "'{text}': a unit is not written '{unit}', b being bits and m a thousandth; did you mean {meant}?"
    )]
    MisspeltUnit { text: String, unit: String, meant: &'static str },
    #[error(
        "'{text}': unknown unit '{unit}'; use K, M, G, T, P (or KiB, MiB, …) for powers of 1024, KB, MB, GB, TB, PB for powers of 1000"
    )]
    UnknownUnit { text: String, unit: String },
    #[error("'{text}' is zero; a size must be at least one byte")]
    Zero { text: String },
    #[error("'{text}' is negative; a size must be at least one byte")]
    Negative { text: String },
    #[error("'{text}' is not a whole number of bytes")]
    Fraction { text: String },
    #[error("'{text}' is too large; the largest size is 8 EiB less one byte")]
    TooLarge { text: String },
}

const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("K", 1 << 10),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("M", 1 << 20),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("G", 1 << 30),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("T", 1 << 40),
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("P", 1 << 50),
    ("PiB", 1 << 50),
    ("PB", 1_000_000_000_000_000),
    // Small letters that can mean nothing else.
    ("k", 1 << 10),
    ("kB", 1_000),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("p", 1 << 50),
];

/// Bytes meant by `text`: a decimal number, possibly with a fraction, and a unit. `K M G T P` and `KiB` …
/// are powers of 1024, `KB` … powers of 1000. Letters count where they tell units apart: `Gb` would be bits and `m`
/// a thousandth. The result is from 1 to `i64::MAX`.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let owned = || text.to_owned();
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(SizeError::Negative { text: owned() });
    }
    let unit_at = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(unit_at);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let malformed = whole.is_empty() || fraction.contains('.') || number.ends_with('.');
    if malformed {
        return Err(SizeError::NotANumber { text: owned() });
    }
    let unit = unit.trim_start();
    let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        let unit = unit.to_owned();
        return Err(match UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(&unit)) {
            Some((meant, _)) => SizeError::MisspeltUnit { text: owned(), unit, meant },
            None => SizeError::UnknownUnit { text: owned(), unit },
        });
    };
    let bytes = scaled(whole, fraction, *scale).ok_or_else(|| SizeError::TooLarge { text: owned() })?;
    match bytes {
        Scaled::Whole(0) => Err(SizeError::Zero { text: owned() }),
        Scaled::Whole(bytes) if bytes > i64::MAX as u64 => Err(SizeError::TooLarge { text: owned() }),
        Scaled::Whole(bytes) => Ok(bytes),
        Scaled::Fraction => Err(SizeError::Fraction { text: owned() }),
    }
}

enum Scaled {
    Whole(u64),
    Fraction,
}

/// `whole.fraction × scale`; `None` on overflow.
fn scaled(whole: &str, fraction: &str, scale: u64) -> Option<Scaled> {
    let fraction = fraction.trim_end_matches('0');
    let tenth_powers = 10u128.checked_pow(fraction.len().try_into().ok()?)?;
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let product = digits.checked_mul(scale.into())?;
    if !product.is_multiple_of(tenth_powers) {
        return Some(Scaled::Fraction);
    }
    Some(Scaled::Whole(u64::try_from(product / tenth_powers).ok()?))
}

/// `bytes` in the largest binary unit that keeps it readable: `512 B`, `64 KiB`, `1.50 TiB`.
pub fn format_size(bytes: u64) -> String {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let scale = 1u64 << (10 * power);
    match bytes.is_multiple_of(scale) {
        true => format!("{} {}", bytes / scale, NAMES[power]),
        false => format!("{:.2} {}", bytes as f64 / scale as f64, NAMES[power]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let cases = [
            ("1", 1),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4KiB", 4096),
            ("4KB", 4000),
            ("1.5GiB", 3 << 29),
            ("10G", 10 << 30),
            ("10 GiB", 10 << 30),
            (" 10 GB ", 10_000_000_000),
            ("10g", 10 << 30),
            ("0.5K", 512),
            ("2TiB", 2 << 40),
            ("1PB", 1_000_000_000_000_000),
            ("9223372036854775807", i64::MAX as u64),
            ("1.50000000", 0),
        ];
        for (text, bytes) in cases {
            match bytes {
                0 => assert!(matches!(parse_size(text), Err(SizeError::Fraction { .. })), "{text}"),
                _ => assert_eq!(parse_size(text), Ok(bytes), "{text}"),
            }
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_by_kind() {
        let kind = |text: &str| parse_size(text).map_err(|error| std::mem::discriminant(&error)).unwrap_err();
        let text = String::new;
        let not_a_number = std::mem::discriminant(&SizeError::NotANumber { text: text() });
        let unknown = std::mem::discriminant(&SizeError::UnknownUnit { text: text(), unit: text() });
        let too_large = std::mem::discriminant(&SizeError::TooLarge { text: text() });
        for bad in ["", " ", "GiB", ".5G", "1.G", "1.2.3G", "+5", "abc"] {
            assert_eq!(kind(bad), not_a_number, "{bad:?}");
        }
        for bad in ["1Q", "1GiBx", "1 G B", "1e9", "0x10", "10GiB!", "1,5G", "1k2"] {
            assert_eq!(kind(bad), unknown, "{bad:?}");
        }
        for bad in ["8192P", "9223372036854775808", "99999999999999999999999999999999999999999999T"] {
            assert_eq!(kind(bad), too_large, "{bad:?}");
        }
        for (bad, meant) in [("10Gb", "GB"), ("10gb", "GB"), ("10m", "M"), ("4kib", "KiB"), ("512b", "B")] {
            let error = parse_size(bad).unwrap_err().to_string();
            assert!(error.ends_with(&format!("did you mean {meant}?")), "{error}");
        }
        assert_eq!(kind("0"), std::mem::discriminant(&SizeError::Zero { text: text() }));
        assert_eq!(kind("0.0G"), std::mem::discriminant(&SizeError::Zero { text: text() }));
        assert_eq!(kind("-1G"), std::mem::discriminant(&SizeError::Negative { text: text() }));
        assert_eq!(kind("0.3B"), std::mem::discriminant(&SizeError::Fraction { text: text() }));
    }

    #[test]
    fn sizes_are_written() {
        let cases = [
            (0, "0 B"),
            (512, "512 B"),
            (4096, "4 KiB"),
            (1536, "1.50 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "16.00 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(format_size(bytes), text);
        }
    }
}
