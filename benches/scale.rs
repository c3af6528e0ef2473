//! What must not depend on how much a pool holds: the calls on the tree of snapshots, and the restart after a crash.
//!
//! `cargo bench --bench scale -- [part=times|restart] [gib=1024] [small=1] [rounds=45] [seed=1]`; both parts when none is
//! named. `gib` GiB are mapped, on a simulated disk that keeps equal blocks once: 1 TiB takes some minutes and about 10 GiB
//! of memory. Ten thousand snapshots in one pool: `--bench space -- part=many`.

#[path = "common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Aim, BLOCK, Bench, Figure, GIB, MIB, Options, anywhere, wait};
use rimrock::device::{SimDisks, SimSpec};
use rimrock::memory::{DmaBuf, DmaSlice};
use rimrock::pool::Volume;
use rimrock::reactor;

/// Reactors.
const CORES: usize = 2;
/// Random writes between two looks at what the device took.
const BURST: u64 = 500;
/// Longer than a commit is put off while nobody writes.
const QUIET: Duration = Duration::from_secs(3);
/// Before a call that is timed: what the one before left to the background is over.
const PAUSE: Duration = Duration::from_millis(5);

fn main() {
    let options = Options::read();
    let (gib, small) = (options.number("gib", 1024), options.number("small", 1));
    let (rounds, seed) = (options.number("rounds", 45), options.number("seed", 1));
    println!("gib={gib} small={small} rounds={rounds} seed={seed}");
    let wanted = options.text("part", "");
    let large = Mapped::new(gib * GIB);
    if wanted.is_empty() || wanted == "times" {
        println!("times:");
        times(&Mapped::new(small * GIB), &large, rounds, seed);
    }
    if wanted.is_empty() || wanted == "restart" {
        println!("restart:");
        restart(large, rounds.div_ceil(9), seed);
    }
}

/// A pool with one volume that is written from end to end.
struct Mapped {
    disks: SimDisks,
    bench: Bench,
    volume: Volume,
    size: u64,
    block: DmaSlice,
}

impl Mapped {
    fn new(size: u64) -> Mapped {
        // So much that what is free never makes a commit come sooner.
        let room = size / 2 * 3 + 4 * GIB;
        let spec = SimSpec { size: room, write_cache: false, latency: false, slow_reads: false };
        let disks = SimDisks::new(1, vec![spec]);
        let bench = Bench::on(disks.open().remove(0), CORES);
        let volume = bench.volume("v", size);
        let data = pattern(MIB as usize);
        let (started, parts) = (Instant::now(), 16.min(size / GIB));
        for part in 0..parts {
            let begun = Instant::now();
            let [from, to] = [part, part + 1].map(|part| size / MIB * part / parts);
            write_all(
                &bench,
                &volume,
                data.clone(),
                16,
                (to - from).div_ceil(CORES as u64),
                move |core, n| (from + n * CORES as u64 + core as u64) * MIB,
            );
            println!(
                "  {} GiB mapped: the last {:.0} at {:.2} GiB/s",
                to * MIB / GIB,
                ((to - from) * MIB) as f64 / GIB as f64,
                ((to - from) * MIB) as f64 / GIB as f64 / begun.elapsed().as_secs_f64(),
            );
        }
        bench.flush(&volume);
        let info = wait(bench.pool.info()).expect("the pool answers");
        println!(
            "  {} GiB in {:.0} s; {} MiB of metadata in two copies, regions of {} MiB",
            info.allocated / GIB,
            started.elapsed().as_secs_f64(),
            info.metadata / MIB,
            info.region_bytes / MIB,
        );
        assert!(info.allocated >= size, "all of the volume is mapped");
        Mapped { disks, bench, volume, size, block: pattern(BLOCK as usize) }
    }

    /// Random blocks of the first `range` bytes.
    fn overwrite(&self, count: u64, seed: u64, range: u64) {
        let offset = anywhere(seed, range);
        let count = count.div_ceil(CORES as u64);
        write_all(&self.bench, &self.volume, self.block.clone(), 16, count, move |core, n| {
            offset(n * CORES as u64 + core as u64)
        });
    }
}

/// Bytes of which each block is the same.
fn pattern(bytes: usize) -> DmaSlice {
    let mut buf = DmaBuf::zeroed(bytes);
    for block in buf.chunks_exact_mut(BLOCK as usize) {
        for (at, byte) in block.iter_mut().enumerate() {
            *byte = (at / 7 % 251) as u8 + 1;
        }
    }
    buf.freeze()
}

/// Writes the same data `count` times from each reactor, `depth` at a time; the `n`th of reactor `core` to
/// `offset(core, n)`.
fn write_all(
    bench: &Bench,
    volume: &Volume,
    data: DmaSlice,
    depth: u64,
    count: u64,
    offset: impl Fn(usize, u64) -> u64 + Send + Copy + 'static,
) {
    let on = |core: usize| {
        let (handle, volume, data) = (bench.handles[core].clone(), volume.clone(), data.clone());
        std::thread::spawn(move || {
            let writers = (0..depth).map(|writer| {
                let (volume, data) = (volume.clone(), data.clone());
                handle.call(move || async move {
                    for n in (writer..count).step_by(depth as usize) {
                        volume.write(offset(core, n), data.clone(), false).await.expect("a write");
                        // The disk never waits: the others get their turn here.
                        reactor::yield_now().await;
                    }
                })
            });
            // All are begun before the first is waited for.
            for writer in writers.map(Box::pin).collect::<Vec<_>>() {
                wait(writer).expect("the reactor lives");
            }
        })
    };
    for thread in (0..CORES).map(on).collect::<Vec<_>>() {
        thread.join().expect("the writers end");
    }
}

/// The calls on the tree of snapshots, in turn with little and with much mapped.
fn times(small: &Mapped, large: &Mapped, rounds: u64, seed: u64) {
    const CALLS: [&str; 4] = ["snapshot", "clone", "rollback", "start of a delete"];
    let mut figures: [[Figure; 2]; 4] = Default::default();
    for round in 0..rounds {
        for turn in 0..2 {
            let at = ((turn + round) % 2) as usize;
            let mapped = [small, large][at];
            mapped.overwrite(64, seed ^ round << 32, mapped.size);
            let pool = &mapped.bench.pool;
            let mut timed = |call: usize, begun: Instant| {
                figures[call][at].add(begun.elapsed().as_secs_f64() * 1e6);
            };
            std::thread::sleep(PAUSE);
            let begun = Instant::now();
            wait(pool.snapshot_create("v", "s")).expect("a snapshot");
            timed(0, begun);
            mapped.overwrite(64, seed ^ (round + rounds) << 32, mapped.size);
            std::thread::sleep(PAUSE);
            let begun = Instant::now();
            wait(pool.clone_create("s", "c")).expect("a clone");
            timed(1, begun);
            std::thread::sleep(PAUSE);
            let begun = Instant::now();
            wait(pool.rollback("v", "s", Some("kept".to_owned()))).expect("a rollback");
            timed(2, begun);
            let mut deletes = Duration::ZERO;
            for name in ["kept", "c", "s"] {
                std::thread::sleep(PAUSE);
                let begun = Instant::now();
                wait(pool.delete(name)).expect("it is deleted");
                deletes += begun.elapsed();
                mapped.bench.settle();
            }
            figures[3][at].add(deletes.as_secs_f64() * 1e6 / 3.0);
        }
    }
    for (call, [small, large]) in CALLS.into_iter().zip(&figures) {
        println!(
            "  {call}: median {:.0} and {:.0} us, slowest {:.0} and {:.0}",
            small.median(),
            large.median(),
            small.quantile(1.0),
            large.quantile(1.0)
        );
    }
    for (call, [small, large]) in CALLS.into_iter().zip(&figures) {
        let mut ratio = Figure::default();
        ratio.add(large.median() / small.median());
        ratio.judge(&format!("{call}: time with much mapped / with little"), Aim::AtMost(1.5));
    }
}

/// Crashes with full journals: what is written at random over everything fills the page cache first, what is written to
/// a part of it fills the journals.
fn restart(mut mapped: Mapped, rounds: u64, seed: u64) {
    let gib = mapped.size / GIB;
    for (what, range) in [("everywhere", mapped.size), ("in 1 GiB", mapped.size.min(GIB))] {
        std::thread::sleep(QUIET);
        let full = until_commit(&mapped, seed, range);
        println!("  random writes {what}: the first commit after {full}");
        let (mut read, mut written) = (Figure::default(), Figure::default());
        for round in 0..rounds {
            std::thread::sleep(QUIET);
            mapped.overwrite(full / 10 * 9, seed ^ round << 32, range);
            // The records are now in the rings, all of them unproven: none was covered by an earlier flush.
            mapped.bench.flush(&mapped.volume);
            let Mapped { disks, bench, volume, size, block } = mapped;
            drop(volume);
            bench.kill();
            disks.settle();
            let (bench, begun) = Bench::import(disks.open().remove(0), CORES);
            let imported = begun.elapsed();
            let volume = wait(bench.pool.open("v")).expect("the volume opens");
            let at = anywhere(seed ^ 7, size)(round);
            let (of, handle) = (volume.clone(), bench.handles[0].clone());
            let first = handle.call(move || async move { of.read(at, DmaBuf::uninit(BLOCK as usize)).await });
            let (result, found) = wait(first).expect("the reactor lives");
            let first_read = begun.elapsed();
            result.expect("a read");
            assert!(found[..] == block[..], "what was written is there");
            let traffic = bench.device.traffic();
            mapped = Mapped { disks, bench, volume, size, block };
            mapped.overwrite(1, seed ^ 9 ^ round << 32, range);
            let first_write = begun.elapsed();
            println!(
                "  imported after {:.0} ms, a block read after {:.0} ms, one written after {:.0} ms; {} reads of {} MiB, {} \
                 writes of {} MiB until it was read",
                imported.as_secs_f64() * 1e3,
                first_read.as_secs_f64() * 1e3,
                first_write.as_secs_f64() * 1e3,
                traffic.reads,
                traffic.read_bytes / MIB,
                traffic.writes,
                traffic.written_bytes / MIB,
            );
            read.add(first_read.as_secs_f64());
            written.add(first_write.as_secs_f64());
        }
        let begin = "seconds from import after a crash with full journals";
        read.judge(&format!("{begin} to the first read, {gib} GiB mapped, written {what}"), Aim::AtMost(2.0));
        written.judge(
            &format!("{begin} to the first write, {gib} GiB mapped, written {what}"),
            Aim::AtMost(2.0),
        );
    }
    mapped.bench.settle();
    let Mapped { bench, volume, .. } = mapped;
    drop(volume);
    bench.close();
}

/// How many random writes it takes until a commit must make room.
fn until_commit(mapped: &Mapped, seed: u64, range: u64) -> u64 {
    let mut written = 0;
    loop {
        let before = mapped.bench.device.traffic();
        mapped.overwrite(BURST, seed ^ 3 ^ written << 24, range);
        written += BURST;
        let took = mapped.bench.device.traffic().since(&before).written_bytes;
        if took > 2 * BURST * BLOCK {
            return written;
        }
    }
}
