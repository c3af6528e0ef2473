//! Every decoder of what lies on a device, against bytes that nobody wrote: the corpus in `tests/corpus/<decoder>/`, and
//! mutations of it, with checksums that fit and that do not. `SEED=n` repeats a run, `SECONDS=n` runs longer,
//! `WRITE_CORPUS=1` writes the seeds anew.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::*;
use crate::pool::catalog::decode_for_test;
use crate::pool::journal::decode_block;
use crate::pool::label::{Geometry, Label};
use crate::pool::node::Nodes;
use crate::pool::pointer::Page;
use crate::pool::root::RootRecord;
use crate::pool::space::{RegionId, Space};

/// A decoder: its name, where its blocks keep their checksum, and what runs it. The result bounds what was made of the
/// bytes.
struct Decoder {
    name: &'static str,
    crc: Option<usize>,
    run: fn(&[u8]) -> usize,
}

const POOL: Uuid = Uuid::from_u128(0x52_49_4D_52_4F_43_4B);

fn geometry() -> Geometry {
    Geometry::choose(64 << 20, 64 << 20, 4, None)
}

const DECODERS: &[Decoder] = &[
    Decoder {
        name: "label",
        crc: Some(12),
        run: |bytes| Label::decode(bytes).map_or(0, |label| label.devices.len() + label.name.len()),
    },
    Decoder {
        name: "root",
        crc: Some(52),
        run: |bytes| usize::from(RootRecord::decode(POOL, 1, bytes).is_some()),
    },
    Decoder {
        name: "page",
        crc: None,
        run: |bytes| Page::parse(bytes).map_or(0, |page| page.iter().count()),
    },
    Decoder {
        name: "node",
        crc: None,
        run: |bytes| {
            let mut nodes = Nodes::default();
            nodes.load(u32::MAX / 128, bytes);
            nodes.own_roots().len()
        },
    },
    Decoder {
        name: "bitmap",
        crc: None,
        run: |bytes| Space::decode(&geometry(), 1, RegionId(3), bytes).map_or(0, |bits| bits.len()),
    },
    Decoder {
        name: "journal",
        crc: Some(4),
        run: |bytes| decode_block(POOL, 1, bytes).map_or(0, |block| block.records.len()),
    },
    Decoder { name: "catalog", crc: Some(4), run: |bytes| decode_for_test(POOL, bytes) },
];

fn corpus(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name)
}

/// Makes the checksum fit again, as a bug would that writes nonsense.
fn reseal(decoder: &Decoder, bytes: &mut [u8]) {
    let Some(at) = decoder.crc.filter(|at| bytes.len() >= at + 4) else { return };
    bytes[at..at + 4].fill(0);
    let covered = match decoder.name {
        "catalog" if bytes.len() >= 28 => {
            let len = u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]) as usize;
            len.min(bytes.len())
        }
        _ => bytes.len(),
    };
    let crc = crate::crc32c::crc32c(&bytes[..covered]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus(name))
        .unwrap_or_else(|error| panic!("tests/corpus/{name}: {error}; WRITE_CORPUS=1 writes it"))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs one input. What is made of bytes is never more than the bytes could say.
fn feed(decoder: &Decoder, bytes: &[u8]) -> usize {
    let made = (decoder.run)(bytes);
    assert!(made <= bytes.len(), "{}: {made} things out of {} bytes", decoder.name, bytes.len());
    made
}

#[test]
fn the_corpus_is_decoded_or_refused() {
    if std::env::var_os("WRITE_CORPUS").is_some() {
        run(write_corpus());
    }
    for decoder in DECODERS {
        let seeds = seeds(decoder.name);
        assert!(seeds.len() >= 2, "{}: {} seeds", decoder.name, seeds.len());
        let decoded = seeds.iter().filter(|bytes| feed(decoder, bytes) > 0).count();
        assert!(decoded > 0, "{}: no seed is whole", decoder.name);
    }
}

#[test]
fn no_mutation_breaks_a_decoder() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("SEED").unwrap_or(fresh);
    println!("SEED={seed}");
    let each = Duration::from_secs(number("SECONDS").unwrap_or(3)) / DECODERS.len() as u32;
    for decoder in DECODERS {
        let (mut state, seeds, until) = (seed | 1, seeds(decoder.name), Instant::now() + each);
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % below.max(1)
        };
        let mut rounds = 0;
        while rounds < 200 || Instant::now() < until {
            rounds += 1;
            let mut bytes = seeds[random(seeds.len())].clone();
            for _ in 0..1 + random(8) {
                // Headers are hit as often as all the rest.
                let reach = if random(2) == 0 { 96.min(bytes.len()) } else { bytes.len() };
                let at = random(reach);
                match (random(6), bytes.get_mut(at)) {
                    (0, Some(byte)) => *byte ^= 1 << random(8),
                    (1, Some(byte)) => *byte = [0, 1, 0x7F, 0x80, 0xFF][random(5)],
                    (2, Some(_)) => {
                        let end = (at + 1 + random(8)).min(bytes.len());
                        bytes[at..end].fill([0, 0xFF][random(2)]);
                    }
                    (3, Some(_)) => {
                        let from = random(bytes.len());
                        let count = random(64).min(bytes.len() - at.max(from));
                        bytes.copy_within(from..from + count, at);
                    }
                    (4, _) if random(8) == 0 => bytes.truncate(at),
                    (_, Some(byte)) => *byte = random(256) as u8,
                    _ => {}
                }
            }
            if random(4) > 0 {
                reseal(decoder, &mut bytes);
            }
            feed(decoder, &bytes);
        }
    }
}

/// Seeds from a real pool, each whole and once damaged.
async fn write_corpus() {
    let devices = [ram(64)];
    let (manager, pool) = pool_on(&devices).await;
    pool.volume_create(spec("v", 16)).await.unwrap();
    write(&pool, "v", 0, &pattern(1, 0, 2 << 20)).await;
    pool.open("v").await.unwrap().flush().await.unwrap();
    pool.snapshot_create("v", "v@1").await.unwrap();
    write(&pool, "v", 4096, &pattern(2, 0, 1 << 20)).await;
    pool.open("v").await.unwrap().deallocate(0, 8192).await.unwrap();
    pool.open("v").await.unwrap().flush().await.unwrap();
    let journals = devices[0].image().unwrap();
    pool.check(CheckOptions::default()).await.unwrap();
    let uuid = pool.uuid();
    let shard = crate::pool::local::shard(pool.key(), 1).unwrap();
    let roots = shard.state.borrow_mut().root(crate::pool::cache::Object::Nodes);
    let metadata = shard.live_metadata().await;
    drop(shard);
    let image = devices[0].image().unwrap();
    manager.shut(&pool).await.unwrap();
    let block = |image: &[u8], at: usize| image[at * 4096..(at + 1) * 4096].to_vec();
    let own = |mut bytes: Vec<u8>| {
        // The corpus is of one pool, whose UUID never changes.
        for at in 0..bytes.len().saturating_sub(16) {
            if bytes[at..at + 16] == *uuid.as_bytes() {
                bytes[at..at + 16].copy_from_slice(POOL.as_bytes());
            }
        }
        bytes
    };
    let blocks = image.chunks(4096);
    let mut found: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("label", vec![block(&image, 0)]),
        (
            "root",
            blocks.clone().filter(|b| b[48..52] == *b"RMRT" && b[92] == 1).map(<[u8]>::to_vec).collect(),
        ),
        ("page", vec![block(&image, roots.block().index() as usize)]),
        ("node", Vec::new()),
        ("bitmap", Vec::new()),
        (
            "journal",
            journals
                .chunks(4096)
                .filter(|b| b.starts_with(b"RMJR") && b[24] == 1)
                .map(<[u8]>::to_vec)
                .collect(),
        ),
        (
            "catalog",
            blocks
                .clone()
                .enumerate()
                .filter(|(_, b)| b.starts_with(b"RMCT"))
                .map(|(at, b)| {
                    let len = u32::from_le_bytes([b[24], b[25], b[26], b[27]]) as usize;
                    image[at * 4096..at * 4096 + len.next_multiple_of(4096).min(16384)].to_vec()
                })
                .collect(),
        ),
    ];
    let node = metadata.iter().map(|at| block(&image, at.index() as usize)).find(|b| {
        let mut nodes = Nodes::default();
        !b.starts_with(b"RMSP") && nodes.load(0, b) && nodes.own_roots().len() == 2
    });
    found[3].1.extend(node);
    let mut bitmap = blocks.clone().find(|b| b.starts_with(b"RMSP")).unwrap().to_vec();
    bitmap[4..8].copy_from_slice(&3u32.to_le_bytes());
    bitmap[16..18].copy_from_slice(&1u16.to_le_bytes());
    found[4].1.push(bitmap);
    for (name, blocks) in found {
        let decoder = DECODERS.iter().find(|decoder| decoder.name == name).unwrap();
        std::fs::create_dir_all(corpus(name)).unwrap();
        for (at, bytes) in blocks.into_iter().take(4).enumerate() {
            let mut bytes = own(bytes);
            reseal(decoder, &mut bytes);
            std::fs::write(corpus(name).join(format!("whole-{at}")), &bytes).unwrap();
            let middle = bytes.len() / 3;
            bytes[middle] ^= 0xFF;
            bytes[25] ^= 0xFF;
            reseal(decoder, &mut bytes);
            std::fs::write(corpus(name).join(format!("damaged-{at}")), &bytes).unwrap();
        }
    }
}
