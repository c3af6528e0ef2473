//! Bit fields, declared once: a field names its highest and lowest bit as the specification's tables do, and the
//! getter and the setter come out of that one line.
#![forbid(unsafe_code)]

/// The bits `hi..=lo` of `value`, moved down to bit 0.
pub const fn get(value: u64, hi: u32, lo: u32) -> u64 {
    (value >> lo) & mask(hi, lo)
}

/// `value` with its bits `hi..=lo` replaced by the low bits of `field`; bits of `field` that do not fit are dropped.
pub const fn set(value: u64, hi: u32, lo: u32, field: u64) -> u64 {
    let mask = mask(hi, lo);
    (value & !(mask << lo)) | ((field & mask) << lo)
}

const fn mask(hi: u32, lo: u32) -> u64 {
    assert!(hi >= lo && hi < 64, "a bit field runs from its highest bit down to its lowest");
    u64::MAX >> (63 - (hi - lo))
}

/// Declares a newtype over an unsigned integer with a getter and a `with_` setter for each flag and field.
///
/// `flags { name, setter: bit; }` are booleans; `fields { name, setter: hi, lo; }` are of the raw type.
macro_rules! bit_fields {
    (
        $(#[$meta:meta])* pub struct $name:ident($raw:ty);
        flags { $( $(#[$flag_meta:meta])* $flag:ident, $with_flag:ident: $bit:literal; )* }
        fields { $( $(#[$field_meta:meta])* $field:ident, $with_field:ident: $hi:literal, $lo:literal; )* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub $raw);

        impl $name {
            $(
                $(#[$flag_meta])*
                pub const fn $flag(self) -> bool {
                    $crate::nvme::bits::get(self.0 as u64, $bit, $bit) != 0
                }

                #[doc = concat!("A copy with `", stringify!($flag), "` set to `value`.")]
                #[must_use]
                pub const fn $with_flag(self, value: bool) -> Self {
                    $name($crate::nvme::bits::set(self.0 as u64, $bit, $bit, value as u64) as $raw)
                }
            )*
            $(
                $(#[$field_meta])*
                pub const fn $field(self) -> $raw {
                    $crate::nvme::bits::get(self.0 as u64, $hi, $lo) as $raw
                }

                #[doc = concat!("A copy with `", stringify!($field), "` replaced.")]
                #[must_use]
                pub const fn $with_field(self, value: $raw) -> Self {
                    $name($crate::nvme::bits::set(self.0 as u64, $hi, $lo, value as u64) as $raw)
                }
            )*
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut out = f.debug_struct(stringify!($name));
                $( if self.$flag() { out.field(stringify!($flag), &true); } )*
                $( if self.$field() != 0 { out.field(stringify!($field), &self.$field()); } )*
                out.finish()
            }
        }
    };
}
pub(crate) use bit_fields;

#[cfg(test)]
mod tests {
    use super::{get, set};

    #[test]
    fn a_field_is_read_from_where_it_was_written() {
        assert_eq!(get(0xABCD_EF01_2345_6789, 63, 0), 0xABCD_EF01_2345_6789);
        assert_eq!(get(0xABCD_EF01_2345_6789, 15, 8), 0x67);
        assert_eq!(get(0x8000_0000_0000_0000, 63, 63), 1);
        assert_eq!(set(0xFFFF, 7, 4, 0), 0xFF0F);
        assert_eq!(set(0, 7, 4, 0x1F), 0xF0, "what does not fit does not spill into the neighbour");
        assert_eq!(set(0, 63, 0, u64::MAX), u64::MAX);
    }

    bit_fields! {
        /// Only for this test.
        pub struct Sample(u16);
        flags { ready, with_ready: 3; }
        fields { size, with_size: 15, 12; }
    }

    #[test]
    fn declared_fields_do_not_touch_each_other() {
        let sample = Sample(0).with_ready(true).with_size(9);
        assert_eq!(sample.0, 0x9008);
        assert!(sample.ready() && sample.size() == 9);
        assert_eq!(sample.with_ready(false).with_size(0).0, 0);
        assert_eq!(format!("{sample:?}"), "Sample { ready: true, size: 9 }");
    }
}
