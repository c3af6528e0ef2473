//! Streams that nobody sent: the corpus in `tests/corpus/stream/`, and mutations of it, with checksums and digest that fit
//! and that do not. `SEED=n` repeats a run, `SECONDS=n` runs longer, `WRITE_CORPUS=1` writes the seeds anew.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::*;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/stream")
}

fn seeds() -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(corpus()).expect("tests/corpus/stream; WRITE_CORPUS=1 writes it");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), std::fs::read(path).unwrap())).collect()
}

/// Whole streams, and each cut, damaged, and with a header that claims more than follows.
fn write_corpus() {
    std::fs::create_dir_all(corpus()).unwrap();
    let whole = [
        stream(header("empty@1", 64 * UNIT), &[]).0,
        sample().0,
        stream(Header { base: None, ..header("m@1", 8 * UNIT) }, &[(1, 2, None), (0, 1, Some(9))]).0,
    ];
    for (at, bytes) in whole.iter().enumerate() {
        let put =
            |kind: &str, bytes: &[u8]| std::fs::write(corpus().join(format!("{kind}-{at}")), bytes).unwrap();
        put("whole", bytes);
        put("cut", &bytes[..bytes.len() * 2 / 3]);
        let mut claims = bytes.clone();
        claims[80..88].copy_from_slice(&(u64::MAX / UNIT * UNIT).to_le_bytes());
        reseal(&mut claims);
        put("claims", &claims);
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 0x40;
        put("damaged", &damaged);
    }
}

/// Makes every checksum, and the digest, fit again, as far as the bytes can be followed.
fn reseal(bytes: &mut [u8]) {
    let number = |bytes: &[u8], at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)) as usize
    };
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let mut at = number(bytes, 12, 4);
    if at < HEADER_BYTES || at > bytes.len() {
        return;
    }
    let crc = crate::crc32c::crc32c(&bytes[..at - 4]);
    bytes[at - 4..at].copy_from_slice(&crc.to_le_bytes());
    while at + RECORD_BYTES <= bytes.len() {
        let follows = if bytes[at..at + 4] == *b"ZERO" { 0 } else { number(bytes, at + 32, 8) };
        let Some(end) = (at + RECORD_BYTES).checked_add(follows).filter(|end| *end <= bytes.len()) else {
            return;
        };
        if bytes[at..at + 4] == *b"END " && end - at >= RECORD_BYTES + 32 {
            let digest = blake3::hash(&bytes[..at]);
            bytes[end - 32..end].copy_from_slice(digest.as_bytes());
        }
        bytes[at + 4..at + 8].fill(0);
        let crc = crate::crc32c::crc32c(&bytes[at..end]);
        bytes[at + 4..at + 8].copy_from_slice(&crc.to_le_bytes());
        at = end;
    }
}

/// Reads one input. What is said before an error is true of the bytes, and a stream that is accepted is one that an
/// encoder could have made.
fn feed(bytes: &[u8], piece: usize) -> bool {
    let (mut decoder, mut rest) = (Decoder::new(), bytes);
    let (mut header, mut next, mut totals, mut ended) = (None::<Header>, 0, Totals::default(), false);
    let result = loop {
        let room = decoder.room();
        assert!(room.len() <= DATA_MAX, "room for {} bytes", room.len());
        let count = room.len().min(piece).min(rest.len());
        if count == 0 {
            break decoder.finish();
        }
        room[..count].copy_from_slice(&rest[..count]);
        rest = &rest[count..];
        let event = match decoder.filled(count) {
            Ok(event) => event,
            Err(error) => break Err(error),
        };
        let (offset, length) = match event {
            None => continue,
            Some(Event::Header(found)) => {
                assert!(header.is_none() && found.size > 0 && found.size.is_multiple_of(UNIT));
                header = Some(found);
                continue;
            }
            Some(Event::End(found)) => {
                assert_eq!(found, totals);
                ended = true;
                continue;
            }
            Some(Event::Zero { offset, length }) => {
                (totals.zero_records, totals.zero_bytes) =
                    (totals.zero_records + 1, totals.zero_bytes + length);
                (offset, length)
            }
            Some(Event::Data { offset, data }) => {
                let length = data.len() as u64;
                (totals.data_records, totals.data_bytes) =
                    (totals.data_records + 1, totals.data_bytes + length);
                assert!(bytes.windows(data.len()).any(|window| window == data));
                (offset, length)
            }
        };
        let size = header.as_ref().expect("the header comes first").size;
        assert!(!ended && length > 0 && offset >= next && offset.is_multiple_of(UNIT));
        next = offset.checked_add(length).filter(|end| *end <= size).expect("a range within the snapshot");
    };
    assert_eq!(result.is_ok(), ended);
    if let (Ok(()), Some(header)) = (&result, header) {
        assert_eq!((totals.data_bytes, totals.zero_bytes), (header.data_bytes, header.zero_bytes));
    }
    result.is_ok() && rest.is_empty()
}

#[test]
fn the_corpus_is_read_or_refused() {
    if std::env::var_os("WRITE_CORPUS").is_some() {
        write_corpus();
    }
    let seeds = seeds();
    assert!(seeds.len() >= 12, "{} seeds", seeds.len());
    for (name, bytes) in seeds {
        for piece in [1, 777, usize::MAX] {
            assert_eq!(feed(&bytes, piece), name.starts_with("whole"), "{name} in pieces of {piece}");
        }
    }
}

#[test]
fn whatever_is_believed_of_a_mutation_is_consistent() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("SEED").unwrap_or(fresh);
    println!("SEED={seed}");
    let until = Instant::now() + Duration::from_secs(number("SECONDS").unwrap_or(2));
    let (mut state, seeds) = (seed | 1, seeds());
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below.max(1)
    };
    let (mut rounds, mut accepted) = (0, 0);
    while rounds < 500 || Instant::now() < until {
        rounds += 1;
        let (_, original) = &seeds[random(seeds.len())];
        let mut bytes = original.clone();
        for _ in 0..1 + random(6) {
            // The header, and the fixed parts of records wherever the data is short, are hit as often as all the rest.
            let reach = if random(2) == 0 { 200.min(bytes.len()) } else { bytes.len() };
            let at = random(reach);
            match random(6) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][random(5)],
                2 => {
                    let end = (at + 1 + random(8)).min(bytes.len());
                    bytes[at..end].fill([0, 0xFF][random(2)]);
                }
                3 => {
                    let from = random(bytes.len());
                    let count = random(200).min(bytes.len() - at.max(from));
                    bytes.copy_within(from..from + count, at);
                }
                4 if random(4) == 0 => bytes.truncate(at.max(1)),
                5 if random(4) == 0 => bytes.extend_from_slice(&original[..random(original.len())]),
                _ => bytes[at] = random(256) as u8,
            }
        }
        let sealed = random(4) > 0;
        if sealed {
            reseal(&mut bytes);
        }
        let good = feed(&bytes, [1 + random(64), 4096, usize::MAX][random(3)]);
        accepted += u32::from(good);
        // Without a new digest nothing but what was sent is believed.
        assert!(!good || sealed || seeds.iter().any(|(_, seed)| *seed == bytes));
    }
    println!("{rounds} streams, {accepted} accepted");
}
