//! Streams: what goes in comes out, and whatever was done to one in between is noticed.
#![forbid(unsafe_code)]

mod corpus;

use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn header(name: &str, size: u64) -> Header {
    Header {
        stream: Uuid::from_u128(0xABCD << 64 | 7),
        uuid: Uuid::from_u128(1),
        base: Some(Uuid::from_u128(2)),
        pool: Uuid::from_u128(3),
        name: name.to_owned(),
        pool_name: "main".to_owned(),
        size,
        block_size: 512,
        created: 1_700_000_000,
        epoch: 9,
        data_bytes: 0,
        zero_bytes: 0,
    }
}

/// Ranges in units: gap, length, and the byte they are filled with, or nothing.
fn stream(mut header: Header, ranges: &[(u64, u64, Option<u8>)]) -> (Vec<u8>, Vec<Event>) {
    let sum = |data: bool| {
        let lengths = ranges.iter().filter(|(.., fill)| fill.is_some() == data).map(|(_, length, _)| length);
        lengths.sum::<u64>() * UNIT
    };
    (header.data_bytes, header.zero_bytes) = (sum(true), sum(false));
    let (mut encoder, mut bytes) = Encoder::new(&header).unwrap();
    let mut events = vec![Event::Header(header)];
    let mut offset = 0;
    for (gap, length, fill) in ranges {
        offset += gap * UNIT;
        match fill {
            Some(fill) => {
                let data = vec![*fill; (length * UNIT) as usize];
                bytes.extend_from_slice(&encoder.data(offset, &data).unwrap());
                bytes.extend_from_slice(&data);
                events.push(Event::Data { offset, data });
            }
            None => {
                bytes.extend_from_slice(&encoder.zero(offset, length * UNIT).unwrap());
                events.push(Event::Zero { offset, length: length * UNIT });
            }
        }
        offset += length * UNIT;
    }
    events.push(Event::End(encoder.totals()));
    bytes.extend_from_slice(&encoder.end().unwrap());
    (bytes, events)
}

/// Reads a stream in pieces of at most `piece` bytes.
fn decode(bytes: &[u8], piece: usize) -> Result<Vec<Event>, StreamError> {
    let (mut decoder, mut rest, mut events) = (Decoder::new(), bytes, Vec::new());
    loop {
        let room = decoder.room();
        let count = room.len().min(piece).min(rest.len());
        if count == 0 {
            break;
        }
        room[..count].copy_from_slice(&rest[..count]);
        rest = &rest[count..];
        events.extend(decoder.filled(count)?);
    }
    decoder.finish()?;
    if rest.is_empty() { Ok(events) } else { Err(decoder.trailing()) }
}

fn sample() -> (Vec<u8>, Vec<Event>) {
    stream(header("model@2", 64 * UNIT), &[(0, 2, Some(1)), (0, 5, None), (3, 1, Some(2)), (1, 1, Some(3))])
}

#[test]
fn a_stream_has_its_golden_bytes() {
    let (bytes, _) = stream(header("m@1", 8 * UNIT), &[(1, 2, None)]);
    assert_eq!(bytes[..16], *b"RIMSEND\0\x01\0\0\0\x90\0\0\0");
    assert_eq!(bytes[80..88], (8 * UNIT).to_le_bytes());
    assert_eq!(bytes[112..124], [&8192u64.to_le_bytes()[..], &512u32.to_le_bytes()].concat());
    assert_eq!(bytes[124..140], *b"\x03\0\x04\0m@1main\0\0\0\0\0");
    assert_eq!(bytes[140..144], crate::crc32c::crc32c(&bytes[..140]).to_le_bytes());
    let record = &bytes[144..184];
    assert_eq!(record[..4], *b"ZERO");
    assert_eq!(record[8..16], (0xABCDu64 ^ 7).to_le_bytes());
    assert_eq!(record[16..40], [0u64, 4096, 8192].map(u64::to_le_bytes).concat());
    let end = &bytes[184..];
    assert_eq!((end.len(), &end[..4]), (104, &b"END "[..]));
    assert_eq!(end[40..72], [0u64, 0, 1, 8192].map(u64::to_le_bytes).concat());
    assert_eq!(end[72..], *blake3::hash(&bytes[..184]).as_bytes());
    let zeroed = [&end[..4], &[0; 4], &end[8..]].concat();
    assert_eq!(end[4..8], crate::crc32c::crc32c(&zeroed).to_le_bytes());
}

#[test]
fn every_cut_is_noticed_where_it_is() {
    let (bytes, events) = sample();
    assert_eq!(decode(&bytes, usize::MAX).unwrap(), events);
    for cut in 0..bytes.len() {
        let error = decode(&bytes[..cut], 4096).unwrap_err();
        let fits = matches!(error.fault, Fault::CutShort(_)) || cut == 0 && error.fault == Fault::NotAStream;
        assert!(fits && error.at <= cut as u64, "cut at {cut}: {error}");
    }
    let longer = [&bytes[..], &[0]].concat();
    let error = decode(&longer, usize::MAX).unwrap_err();
    assert_eq!(error, StreamError { at: bytes.len() as u64, fault: Fault::Trailing });
}

#[test]
fn every_flipped_bit_is_noticed_where_it_is() {
    // Small enough that each bit is tried, but for the data, where every 97th is.
    let (bytes, _) = sample();
    let starts = [0, 144, 144 + 8232, 144 + 8272, 144 + 8272 + 4136, 144 + 8272 + 8272, bytes.len()];
    for bit in (0..bytes.len() * 8).filter(|bit| !(bit / 8 > 200 && bit / 8 < 8376) || bit % 97 == 0) {
        let mut broken = bytes.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        let error = decode(&broken, usize::MAX).unwrap_err();
        let part = starts.windows(2).find(|part| (part[0]..part[1]).contains(&(bit / 8))).unwrap();
        assert_eq!(error.at, part[0] as u64, "bit {bit}: {error}");
    }
}

#[test]
fn records_that_are_moved_or_come_from_elsewhere_are_noticed() {
    let (bytes, _) = sample();
    // The two records of one block each lie before the end record.
    let (first, end) = (144 + 8272, 144 + 8272 + 2 * 4136);
    let swapped =
        [&bytes[..first], &bytes[first + 4136..end], &bytes[first..first + 4136], &bytes[end..]].concat();
    let error = decode(&swapped, usize::MAX).unwrap_err();
    assert_eq!(error, StreamError { at: first as u64, fault: Fault::Sequence { expected: 2, found: 3 } });
    let missing = [&bytes[..first], &bytes[first + 4136..]].concat();
    assert_eq!(decode(&missing, usize::MAX).unwrap_err(), error);
    let twice = [&bytes[..first + 4136], &bytes[first..]].concat();
    let error = decode(&twice, usize::MAX).unwrap_err();
    assert_eq!(error.fault, Fault::Sequence { expected: 3, found: 2 });

    let other = Header { stream: Uuid::from_u128(99), ..header("model@2", 64 * UNIT) };
    let ranges = [(0, 2, Some(1)), (0, 5, None), (3, 1, Some(9)), (1, 1, Some(3))];
    let (other, _) = stream(other, &ranges);
    let spliced = [&bytes[..first], &other[first..]].concat();
    let error = decode(&spliced, usize::MAX).unwrap_err();
    assert_eq!(error, StreamError { at: first as u64, fault: Fault::OtherStream });

    // A forger who keeps every checksum and number in order still fails at the digest.
    let (same, _) = stream(header("model@2", 64 * UNIT), &ranges);
    let forged = [&bytes[..first], &same[first..end], &bytes[end..]].concat();
    let error = decode(&forged, usize::MAX).unwrap_err();
    assert_eq!(error, StreamError { at: end as u64, fault: Fault::Digest });
}

#[test]
fn what_cannot_be_is_refused_on_both_sides() {
    for (name, size) in [("", UNIT), ("-a", UNIT), ("a/b", UNIT), ("m", 0), ("m", 100), ("m", 1 << 63)] {
        assert!(Encoder::new(&header(name, size)).is_err(), "{name:?} {size}");
    }
    let (mut encoder, _) = Encoder::new(&header("m", 4 * UNIT)).unwrap();
    for (offset, length) in [(0, 0), (1, UNIT), (0, 100), (0, 5 * UNIT), (u64::MAX - 4095, UNIT)] {
        assert!(encoder.zero(offset, length).is_err(), "{offset} {length}");
    }
    encoder.zero(UNIT, 2 * UNIT).unwrap();
    assert!(encoder.zero(2 * UNIT, UNIT).is_err() && encoder.zero(0, UNIT).is_err());
    assert!(encoder.data(3 * UNIT, &[0; DATA_MAX + 4096]).is_err());
    // The header announced no zeroes.
    assert_eq!(encoder.end().unwrap_err().fault, Fault::Sums("header"));

    let (mut bytes, _) = sample();
    bytes[8] = 2;
    assert_eq!(decode(&bytes, 1).unwrap_err(), StreamError { at: 0, fault: Fault::Version(2) });
    assert_eq!(decode(&[b'x'; 200], 64).unwrap_err().fault, Fault::NotAStream);
}

proptest! {
    #[test]
    fn what_goes_in_comes_out_whatever_the_pieces(
        ranges in prop::collection::vec((0..4u64, 1..5u64, prop::option::of(any::<u8>())), 0..20),
        piece in 1..20_000usize,
        name in "[A-Za-z0-9][A-Za-z0-9._:@+-]{0,222}",
        base in prop::option::of(1..u128::MAX),
    ) {
        let base = base.map(Uuid::from_u128).filter(|base| *base != Uuid::from_u128(1));
        let header = Header { base, ..header(&name, 1000 * UNIT) };
        let (bytes, events) = stream(header, &ranges);
        prop_assert_eq!(decode(&bytes, piece).unwrap(), events);
    }

    #[test]
    fn no_bytes_make_it_panic_or_believe(
        start in prop::option::of(0..17_000usize),
        noise in prop::collection::vec(any::<u8>(), 1..300),
    ) {
        let (mut bytes, events) = sample();
        match start {
            // Noise in the middle of a good stream.
            Some(start) => {
                let start = start % bytes.len();
                let end = (start + noise.len()).min(bytes.len());
                bytes[start..end].copy_from_slice(&noise[..end - start]);
            }
            None => bytes = noise,
        }
        if let Ok(found) = decode(&bytes, 777) {
            prop_assert_eq!(found, events);
        }
    }
}
