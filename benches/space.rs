//! What reaches the device, what comes back, and what ten thousand snapshots cost.
//!
//! `cargo bench --bench space -- [part=amplification|delete|many] [rounds=5] [seed=1] [file=PATH]`; all parts when none is
//! named. The first part writes into a sparse file of 80 GiB at `file` (by default below `target`), which is removed, or
//! on memory with `device=ram:8GiB`: the volume is thin, so that its 64 GiB need not be there.

#[path = "common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Aim, BLOCK, Bench, Figure, GIB, Load, MIB, Options, anywhere, wait};
use rimrock::pool::Volume;

fn main() {
    let options = Options::read();
    let (rounds, seed) = (options.number("rounds", 5), options.number("seed", 1));
    println!("rounds={rounds} seed={seed}");
    let wanted = options.text("part", "");
    if wanted.is_empty() || wanted == "amplification" {
        let file = options.text("file", concat!(env!("CARGO_TARGET_TMPDIR"), "/space-bench.img"));
        let device = options.text("device", &format!("uring:{file}?size=80GiB"));
        let made = !std::path::Path::new(&file).exists();
        amplification(&device, rounds, seed, options.number("gib", 64) * GIB);
        if made && device.starts_with("uring:") {
            let _ = std::fs::remove_file(&file);
        }
    }
    if wanted.is_empty() || wanted == "delete" {
        delete(rounds, seed, options.number("held", 1024) * MIB);
    }
    if wanted.is_empty() || wanted == "many" {
        many(options.number("snapshots", 10_000));
    }
}

/// Random writes of one measurement: what is dirty at its end is counted too, so it must not be most of what was.
const WINDOW: u64 = GIB;

/// Bytes that reach the device per byte written, with the commits that follow.
fn amplification(uri: &str, rounds: u64, seed: u64, size: u64) {
    let bench = Bench::new(uri, 1);
    println!("amplification: volume of {} GiB on {uri}", size / GIB);
    let volume = bench.volume("v", size);
    let sequential = |from: u64, bytes: u64| {
        ratio(&bench, &volume, bytes, || {
            bench.run(&volume, Load::write(8).of(1 << 20), bytes / MIB, move |n| from + n * MIB);
        })
    };
    let random = |seed: u64, bytes: u64| {
        ratio(&bench, &volume, bytes, || {
            bench.run(&volume, Load::write(32), bytes / BLOCK, anywhere(seed, size));
        })
    };
    // Every leaf page is there before anything counts.
    let filled = random(seed, 4 * size / MIB * BLOCK);
    println!("  first 4 KiB random writes, four per MiB: {filled:.3}");
    let mut figures: [Figure; 4] = Default::default();
    for round in 0..rounds {
        let in_order = sequential(round * GIB, GIB);
        let steady = random(seed ^ (2 * round + 1) << 32, WINDOW);
        bench.snapshot("v", &format!("s{round}"));
        let after = random(seed ^ (2 * round + 2) << 32, WINDOW);
        println!("  1 MiB in order {in_order:.4}, 4 KiB random {steady:.3}, after a snapshot {after:.3}");
        for (figure, value) in figures.iter_mut().zip([in_order, steady, after, after / steady]) {
            figure.add(value);
        }
    }
    figures[0].judge("device bytes / host bytes, 1 MiB in order", Aim::AtMost(1.02));
    figures[1].judge("device bytes / host bytes, 4 KiB random", Aim::AtMost(2.2));
    figures[2].judge("device bytes / host bytes, 4 KiB random, right after a snapshot", Aim::AtMost(2.2));
    figures[3].judge("the same, after a snapshot / before", Aim::AtMost(1.05));
    drop(volume);
    bench.close();
}

/// Bytes written to the device by `work`, and by the flush and the commits after it, per byte of `bytes`.
fn ratio(bench: &Bench, volume: &Volume, bytes: u64, work: impl Fn()) -> f64 {
    let before = bench.device.traffic();
    work();
    bench.flush(volume);
    // Whatever is dirty goes out with the next commit, which a busy interval puts off to the one after it.
    let mut last = bench.device.traffic();
    let mut quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(4600) {
        std::thread::sleep(Duration::from_millis(100));
        let now = bench.device.traffic();
        if now.written_bytes != last.written_bytes {
            (last, quiet) = (now, Instant::now());
        }
    }
    last.since(&before).written_bytes as f64 / bytes as f64
}

/// A snapshot that alone holds `held` bytes is deleted, without and beside a neighbour that reads.
fn delete(rounds: u64, seed: u64, held: u64) {
    println!("delete: a snapshot that alone holds {} MiB", held / MIB);
    let bench = Bench::new(&format!("ram:{}MiB?populate=yes", 3 * held / MIB), 1);
    let neighbour = bench.full_volume("neighbour", 256 * MIB);
    let volume = bench.full_volume("v", held);
    let mut figures: [Figure; 4] = Default::default();
    // Seconds, and what of the bytes that it alone held came back.
    let timed = |name: &str| {
        let unique = wait(bench.pool.node(name)).expect("the snapshot").unique.expect("a walk");
        let (before, started) = (allocated(&bench), Instant::now());
        bench.delete(&[name.to_owned()]);
        let took = started.elapsed().as_secs_f64();
        (took, (before - allocated(&bench)) as f64 / unique as f64)
    };
    let overwritten = |name: &str| {
        bench.snapshot("v", name);
        bench.run(&volume, Load::write(8).of(1 << 20), held / MIB, |n| n * MIB);
        bench.flush(&volume);
        // The commits of all that are over.
        std::thread::sleep(Duration::from_millis(2500));
    };
    for round in 0..rounds {
        overwritten(&format!("a{round}"));
        let (took, share) = timed(&format!("a{round}"));
        overwritten(&format!("b{round}"));
        let read = |salt: u64| {
            bench.start(0, &neighbour, Load::read(8), anywhere(seed ^ salt ^ round << 32, 256 * MIB))
        };
        let reading = read(1);
        std::thread::sleep(Duration::from_secs(1));
        let alone = reading.stop();
        let reading = read(2);
        let (beside_took, beside_share) = timed(&format!("b{round}"));
        let beside = reading.stop();
        let rate = |took: f64| held as f64 / GIB as f64 / took;
        println!(
            "  {:.2} GiB/s alone, {:.2} beside reads; the neighbour's p99 {:.1} us alone, {:.1} us beside ({} reads), \
             p99.9 {:.1} and {:.1}, slowest {:.0} and {:.0}",
            rate(took),
            rate(beside_took),
            alone.at(0.99),
            beside.at(0.99),
            beside.operations,
            alone.at(0.999),
            beside.at(0.999),
            alone.at(1.0),
            beside.at(1.0),
        );
        for share in [share, beside_share] {
            figures[0].add(1.0 - (share - 1.0).abs());
        }
        figures[1].add(rate(took));
        figures[2].add(rate(beside_took));
        figures[3].add(beside.at(0.99) / alone.at(0.99));
    }
    figures[0].judge("freed against unique, 1 - deviation", Aim::AtLeast(0.99));
    figures[1].judge("freed space, GiB/s", Aim::AtLeast(1.0));
    figures[2].judge("freed space beside a reading neighbour, GiB/s", Aim::AtLeast(1.0));
    figures[3].judge("neighbour's p99 read latency while deleting / alone", Aim::AtMost(1.5));
    drop((volume, neighbour));
    bench.close();
}

fn allocated(bench: &Bench) -> u64 {
    wait(bench.pool.info()).expect("the pool answers").allocated
}

/// The time of a snapshot and of a list with few snapshots and with many.
fn many(snapshots: u64) {
    const SAMPLE: u64 = 200;
    println!("many: {snapshots} snapshots");
    let bench = Bench::new("ram:16GiB", 1);
    let volume = bench.full_volume("v", 64 * MIB);
    let (mut first, mut last) = (Figure::default(), Figure::default());
    let (mut short, mut long) = (Figure::default(), Figure::default());
    let (mut one_of_few, mut one_of_many) = (Figure::default(), Figure::default());
    let started = Instant::now();
    for n in 0..snapshots {
        bench.run(&volume, Load::write(4), 4, anywhere(n, 64 * MIB));
        let started = Instant::now();
        bench.snapshot("v", &format!("s{n}"));
        let took = started.elapsed().as_secs_f64() * 1e6;
        if n < SAMPLE {
            first.add(took);
        } else if n >= snapshots - SAMPLE {
            last.add(took);
        }
        if n == SAMPLE - 1 {
            list(&bench, &mut short, &mut one_of_few);
        }
    }
    let took = started.elapsed();
    list(&bench, &mut long, &mut one_of_many);
    println!(
        "  {snapshots} made in {:.1} s; create {:.0} us at first, {:.0} us at last; list {:.2} ms of {SAMPLE}, {:.2} ms of \
         {snapshots}: {:.2} and {:.2} us each; show one {:.0} and {:.0} us",
        took.as_secs_f64(),
        first.median(),
        last.median(),
        short.median() / 1e3,
        long.median() / 1e3,
        short.median() / SAMPLE as f64,
        long.median() / snapshots as f64,
        one_of_few.median(),
        one_of_many.median(),
    );
    let mut ratios: [Figure; 3] = Default::default();
    ratios[0].add(last.median() / first.median());
    ratios[1].add(long.median() / snapshots as f64 / (short.median() / SAMPLE as f64));
    ratios[2].add(one_of_many.median() / one_of_few.median());
    ratios[0].judge("create the last / the first", Aim::AtMost(2.0));
    ratios[1].judge("list, per snapshot, with all / with the first 200", Aim::AtMost(2.0));
    ratios[2].judge("show one, among all / among the first 200", Aim::AtMost(2.0));
    drop(volume);
    bench.close();
}

fn list(bench: &Bench, all: &mut Figure, one: &mut Figure) {
    for _ in 0..15 {
        let started = Instant::now();
        wait(bench.pool.nodes()).expect("a list");
        all.add(started.elapsed().as_secs_f64() * 1e6);
    }
    // By itself: after a long list the processor's caches hold nothing of what one snapshot needs.
    for n in 0..200 {
        let started = Instant::now();
        wait(bench.pool.find(&format!("s{n}"))).expect("a snapshot");
        one.add(started.elapsed().as_secs_f64() * 1e6);
    }
}
