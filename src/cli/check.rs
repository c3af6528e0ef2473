//! Checks the devices of a pool that is not up, and prints what a check found.
#![forbid(unsafe_code)]

use super::Failure;
use super::output::{Format, print, print_json};
use crate::device::{Device, OpenOptions};
use crate::pool::{CheckOptions, check_devices};
use crate::reactor::{PollMode, ReactorConfig, Reactors, block_on};
use serde_json::{Value, json};
use std::fmt::Write;

/// Checks devices right here, without a daemon. They are opened for writing only when something shall be repaired.
pub fn offline(uris: &[String], repair: bool, data: bool) -> Result<Value, Failure> {
    let mut devices = Vec::new();
    for uri in uris {
        let options = OpenOptions { read_only: !repair };
        devices.push(Device::open(uri, options).map_err(|error| Failure::failed(error.to_string()))?);
    }
    let failed = |error: String| Failure::failed(error);
    let config = ReactorConfig { cores: vec![0], poll: PollMode::Adaptive, spin_us: 0 };
    let reactors = Reactors::start(config).map_err(|error| failed(error.to_string()))?;
    let handle = reactors.handles()[0].clone();
    let check = handle.call(move || check_devices(devices, CheckOptions { repair, data }));
    let report = block_on(check).map_err(|_| failed("the check was broken off".to_owned()))?;
    reactors.shutdown();
    let report = report.map_err(|error| failed(error.to_string()))?;
    Ok(json!(report))
}

/// Prints a report; an error when something is wrong and stays so.
pub fn print_report(format: Format, report: &Value, dry_run: bool) -> Result<(), Failure> {
    match format {
        Format::Json => print_json(report)?,
        Format::Table => print(&told(report, dry_run))?,
    }
    match report["clean"].as_bool() {
        Some(true) => Ok(()),
        _ => Err(Failure::found()),
    }
}

fn told(report: &Value, dry_run: bool) -> String {
    let mut text = String::new();
    for finding in report["findings"].as_array().into_iter().flatten() {
        let word = |name: &str| finding[name].as_str().unwrap_or("-").to_owned();
        let done = match (finding["repaired"].as_bool(), finding["repairable"].as_bool()) {
            (Some(true), _) => "repaired",
            (_, Some(true)) if dry_run => "would be repaired",
            (_, Some(true)) => "can be repaired with --repair",
            _ => "cannot be repaired",
        };
        let _ = writeln!(text, "{}: {} ({done})", word("severity"), word("what"));
        write_places(&mut text, finding);
        if finding["cost"] != "nothing" {
            let _ = writeln!(text, "    to give it up costs: {}", word("cost"));
        }
    }
    let number = |name: &str| report[name].as_u64().unwrap_or(0);
    if number("more") > 0 {
        let _ = writeln!(text, "and {} more", number("more"));
    }
    let verdict = if report["clean"] == true { "is sound" } else { "is not sound" };
    let _ = writeln!(
        text,
        "pool {} {verdict}: {} metadata blocks and {} data blocks read, {} data blocks named",
        report["pool"].as_str().unwrap_or("-"),
        number("metadata_blocks"),
        number("data_blocks"),
        number("named_blocks")
    );
    text
}

fn write_places(text: &mut String, thing: &Value) {
    if let Some(device) = thing["place"]["device"].as_str() {
        let place = &thing["place"];
        let _ = writeln!(text, "    {} bytes at byte {} of {device}", place["length"], place["offset"]);
    }
    for extent in thing["extents"].as_array().into_iter().flatten() {
        let name = extent["name"].as_str().unwrap_or("-");
        let _ = writeln!(text, "    {name}: {} blocks from LBA {} on", extent["blocks"], extent["lba"]);
    }
}

/// Prints the damage list.
pub fn print_damage(format: Format, list: &Value) -> Result<(), Failure> {
    if format == Format::Json {
        return print_json(list);
    }
    let mut text = String::new();
    for damage in list.as_array().into_iter().flatten() {
        let word = |name: &str| damage[name].as_str().unwrap_or("-").to_owned();
        let _ = writeln!(text, "{}: {}", word("state"), word("what"));
        write_places(&mut text, damage);
    }
    print(if text.is_empty() { "no damage was found\n" } else { &text })
}
