//! `rimrock snapshot receive --check`: whether a stream is whole, without a daemon.
#![forbid(unsafe_code)]

use super::input::Input;
use super::progress;
use crate::cli::Failure;
use crate::cli::output::{Column, Format, Show, print_object};
use crate::stream::{Event, Header, RECORD_BYTES, Totals};
use crossbeam_channel::bounded;
use serde_json::{Value, json};

const CHECKED: &[Column] = &[
    ("name", "name", Show::Plain),
    ("from pool", "pool", Show::Plain),
    ("uuid", "uuid", Show::Plain),
    ("needs", "base", Show::Plain),
    ("size", "size", Show::Bytes),
    ("block size", "block_size", Show::Plain),
    ("taken", "created", Show::Time),
    ("data", "data_bytes", Show::Bytes),
    ("became zero", "zero_bytes", Show::Bytes),
    ("whole", "whole", Show::Plain),
];

/// Reads a stream to its end and prints what it holds; an error names the place and the fault.
pub fn check(input: Input, format: Format, quiet: bool) -> Result<(), Failure> {
    let bar = progress(input.length(), "checking", quiet);
    let (events, to_judge) = bounded(8);
    let (spare, returned) = bounded::<Vec<u8>>(8);
    std::thread::spawn(move || input.decode(&events, &returned));
    let judge = || {
        let (mut header, mut totals) = (None, None);
        for event in to_judge {
            match event? {
                Event::Header(found) => header = Some(found),
                Event::Data { data, .. } => {
                    bar.inc((data.len() + RECORD_BYTES) as u64);
                    drop(spare.try_send(data));
                }
                Event::Zero { .. } => bar.inc(RECORD_BYTES as u64),
                Event::End(found) => totals = Some(found),
            }
        }
        Ok::<_, Failure>(header.zip(totals))
    };
    let judged = judge();
    bar.finish_and_clear();
    let (header, totals) = judged?.ok_or_else(|| Failure::failed("the stream ended without a word"))?;
    if quiet {
        return Ok(());
    }
    print_object(format, &told(&header, &totals), CHECKED)
}

fn told(header: &Header, totals: &Totals) -> Value {
    json!({
        "name": header.name,
        "pool": header.pool_name,
        "uuid": header.uuid,
        "base": header.base,
        "stream": header.stream,
        "size": header.size,
        "block_size": header.block_size,
        "created": header.created,
        "data_bytes": totals.data_bytes,
        "zero_bytes": totals.zero_bytes,
        "records": totals.data_records + totals.zero_records,
        "whole": true,
    })
}
