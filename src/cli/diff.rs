//! `rimrock snapshot diff` and `rimrock volume diff`: what differs, part by part, so that neither side holds all of it.
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{Format, print};
use super::{Common, Failure};
use crate::units::format_size;
use serde_json::{Value, json};

/// What is compared.
#[derive(Debug, clap::Args)]
pub struct Diff {
    /// The older of two; alone, the one whose data is listed
    from: String,
    /// The newer
    to: Option<String>,
}

/// A range of bytes and whether it holds data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Data; otherwise zeroes where something may have been.
    pub is_data: bool,
}

/// Gives every range of `to` that differs from `from`, or holds data, to `found`, in ascending order and as long as they
/// are.
pub fn each(
    common: &Common,
    from: Option<&str>,
    to: &str,
    mut found: impl FnMut(Range) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut open = None::<Range>;
    let arguments = || Arguments::new().maybe("from", from).with("to", to);
    parts(common, "snapshot_diff", arguments, |range| match &mut open {
        // One that goes on from the part before.
        Some(last) if last.offset + last.length == range.offset && last.is_data == range.is_data => {
            last.length += range.length;
            Ok(())
        }
        _ => open.replace(range).map_or(Ok(()), &mut found),
    })?;
    open.map_or(Ok(()), found)
}

/// Gives the ranges that a method lists part by part to `found`, as they come: one may go on in the next.
pub fn parts(
    common: &Common,
    method: &str,
    arguments: impl Fn() -> Arguments,
    mut found: impl FnMut(Range) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (mut offset, mut end) = (0, 0);
    loop {
        let answer = call(common, method, arguments().with("offset", offset))?;
        for range in answer["ranges"].as_array().map_or(&[][..], Vec::as_slice) {
            let (Some(offset), Some(length)) = (range["offset"].as_u64(), range["length"].as_u64()) else {
                return Err(Failure::failed("the daemon lists a range without its place"));
            };
            if offset < end || length == 0 {
                return Err(Failure::failed("the daemon lists ranges that are not in order"));
            }
            end = offset.checked_add(length).ok_or_else(|| Failure::failed("a range has no end"))?;
            found(Range { offset, length, is_data: range["kind"] == "data" })?;
        }
        match answer["next_offset"].as_u64() {
            Some(next) if next > offset => offset = next,
            Some(_) => return Err(Failure::failed("the daemon does not get on with the comparison")),
            None => return Ok(()),
        }
    }
}

impl Diff {
    /// Prints what differs.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let (from, to) = match &self.to {
            Some(to) => (Some(self.from.as_str()), to.as_str()),
            None => (None, self.from.as_str()),
        };
        let (mut data, mut zero, mut count) = (0u64, 0u64, 0u64);
        let json = common.output == Format::Json;
        each(common, from, to, |range| {
            let kind = if range.is_data { "data" } else { "zero" };
            *(if range.is_data { &mut data } else { &mut zero }) += range.length;
            count += 1;
            match (json, count) {
                (true, 1) => print("{\n  \"ranges\": [")?,
                (true, _) => print(",")?,
                (false, 1) => print(&line("OFFSET", "LENGTH", "KIND"))?,
                (false, _) => {}
            }
            match json {
                true => {
                    let object = json!({ "offset": range.offset, "length": range.length, "kind": kind });
                    print(&format!("\n    {object}"))
                }
                false => print(&line(&range.offset.to_string(), &format_size(range.length), kind)),
            }
        })?;
        if json {
            let open = if count == 0 { "{\n  \"ranges\": [" } else { "\n  " };
            let sums = [("changed_bytes", data + zero), ("data_bytes", data), ("zero_bytes", zero)];
            let sums = sums.map(|(name, bytes)| format!(",\n  \"{name}\": {}", Value::from(bytes)));
            return print(&format!("{open}]{}\n}}\n", sums.concat()));
        }
        let (what, nothing) = match from {
            Some(_) => ("differs", "nothing differs"),
            None => ("is data", "nothing is there"),
        };
        let ranges = if count == 1 { "1 range".to_owned() } else { format!("{count} ranges") };
        print(&match (data + zero, zero) {
            (0, _) => format!("{nothing}\n"),
            (all, 0) => format!("{} {what}, in {ranges}\n", format_size(all)),
            (all, zero) => {
                format!("{} {what}, in {ranges}; {} of it became zero\n", format_size(all), format_size(zero))
            }
        })
    }
}

fn line(offset: &str, length: &str, kind: &str) -> String {
    format!("{offset:>16}  {length:>10}  {kind}\n")
}
