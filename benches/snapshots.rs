//! What a snapshot costs those who write and read: first overwrites, first writes, deep chains, and a snapshot a second.
//!
//! `cargo bench --bench snapshots -- [part=first|thin|deep|load|group] [rounds=9] [seed=1] [gib=1]`; all parts when none
//! is named. On a device in memory, so that the pool's own work is what is measured.

#[path = "common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{
    Aim, BLOCK, Bench, Figure, GIB, Load, MIB, Measured, Options, Running, anywhere, one_per_mib, wait,
};
use rimrock::pool::Volume;

/// Takes the rounds, the seed and the size of a volume in bytes.
type Part = fn(u64, u64, u64);

fn main() {
    let options = Options::read();
    let (rounds, seed, gib) =
        (options.number("rounds", 9), options.number("seed", 1), options.number("gib", 1));
    println!("rounds={rounds} seed={seed} gib={gib}");
    let parts: [(&str, Part); 5] =
        [("first", first), ("thin", thin), ("deep", deep), ("load", load), ("group", group)];
    let wanted = options.text("part", "");
    for (name, part) in parts {
        if wanted.is_empty() || wanted == name {
            println!("{name}:");
            part(rounds, seed, gib * GIB);
        }
    }
}

/// A thin volume so large that one write per MiB of it takes a while, and dirties more pages than one commit takes.
const WIDE: u64 = 32 * GIB;

/// The first overwrite after a snapshot against steady overwriting.
fn first(rounds: u64, seed: u64, size: u64) {
    let bench = Bench::new(&format!("ram:{}MiB?populate=yes", 3 * size / MIB + 2048), 1);
    let volume = bench.full_volume("v", size);
    let wide = bench.volume("wide", WIDE);
    let pass = || bench.run(&wide, Load::write(32), WIDE / MIB, one_per_mib(WIDE));
    pass();
    let mut figures: [Figure; 4] = Default::default();
    for round in 0..rounds {
        // One write per MiB, each the first since the snapshot; then the same again.
        let (mut after, mut steady) = (Measured::none(), Measured::none());
        for n in 0..4 {
            bench.snapshot("wide", &format!("w{n}"));
            after.add(&pass());
            steady.add(&pass());
        }
        show("one per MiB", &after, &steady);
        figures[0].add(after.rate() / steady.rate());
        figures[1].add(after.at(0.999) / steady.at(0.999));
        bench.delete(&(0..4).map(|n| format!("w{n}")).collect::<Vec<_>>());

        // Random over the whole.
        let operations = size / BLOCK / 4;
        let random = |salt: u64| {
            bench.run(&volume, Load::write(32), operations, anywhere(seed ^ salt ^ round << 32, size))
        };
        let steady = random(1);
        bench.snapshot("v", "s");
        let after = random(2);
        show("random", &after, &steady);
        figures[2].add(after.rate() / steady.rate());
        figures[3].add(after.at(0.999) / steady.at(0.999));
        bench.delete(&["s".to_owned()]);
    }
    figures[0].judge("first overwrite after a snapshot / steady, one per MiB, throughput", Aim::AtLeast(0.9));
    figures[1]
        .judge("first overwrite after a snapshot / steady, one per MiB, p99.9 latency", Aim::AtMost(1.5));
    figures[2].judge("overwriting after a snapshot / steady, random, throughput", Aim::AtLeast(0.95));
    figures[3].judge("overwriting after a snapshot / steady, random, p99.9 latency", Aim::AtMost(1.5));
    drop((volume, wide));
    bench.close();
}

fn show(what: &str, a: &Measured, b: &Measured) {
    println!(
        "  {what:12} {:7.0} k/s p99.9 {:7.1} us  against {:7.0} k/s p99.9 {:7.1} us",
        a.rate() / 1e3,
        a.at(0.999),
        b.rate() / 1e3,
        b.at(0.999)
    );
}

/// First writes to a thin volume against overwriting it.
fn thin(rounds: u64, _: u64, _: u64) {
    let bench = Bench::new("ram:4GiB?populate=yes", 1);
    let mut figure = Figure::default();
    for round in 0..rounds {
        let (mut fresh, mut steady) = (Measured::none(), Measured::none());
        for n in 0..4 {
            let name = format!("v{round}-{n}");
            let volume = bench.volume(&name, WIDE);
            let pass = || bench.run(&volume, Load::write(32), WIDE / MIB, one_per_mib(WIDE));
            fresh.add(&pass());
            steady.add(&pass());
            drop(volume);
            bench.delete(&[name]);
        }
        show("thin", &fresh, &steady);
        figure.add(fresh.rate() / steady.rate());
    }
    figure.judge("first write to a thin volume / steady, one per MiB, throughput", Aim::AtLeast(0.8));
    bench.close();
}

/// Random reads of volumes with none, 64 and 1,000 snapshots behind them.
fn deep(rounds: u64, seed: u64, size: u64) {
    const DEPTHS: [u64; 3] = [0, 64, 1000];
    let size = size / 2;
    let bench = Bench::new(&format!("ram:{}MiB?populate=yes", 8 * size / MIB), 1);
    let volumes = DEPTHS.map(|depth| {
        let name = format!("v{depth}");
        let volume = bench.full_volume(&name, size);
        for number in 0..depth {
            bench.snapshot(&name, &format!("{name}@{number}"));
            bench.run(&volume, Load::write(16), 64, anywhere(seed ^ number, size));
        }
        bench.flush(&volume);
        volume
    });
    let mut figures: [Figure; 3] = Default::default();
    let operations = size / BLOCK * 2;
    for round in 0..rounds {
        let mut rates = [0.0; 3];
        for turn in 0..3 {
            let at = ((turn + round) % 3) as usize;
            let offset = anywhere(seed ^ round << 32, size);
            rates[at] = bench.run(&volumes[at], Load::read(32), operations, offset).rate();
        }
        println!("  {:.0}, {:.0}, {:.0} k/s", rates[0] / 1e3, rates[1] / 1e3, rates[2] / 1e3);
        for (figure, rate) in figures.iter_mut().zip(rates) {
            figure.add(rate / rates[0]);
        }
    }
    figures[1].judge("random read, 64 snapshots deep / none", Aim::AtLeast(0.98));
    figures[2].judge("random read, 1,000 snapshots deep / none", Aim::AtLeast(0.98));
    drop(volumes);
    bench.close();
}

/// Writes on two reactors with a snapshot a second, and without.
fn load(rounds: u64, seed: u64, size: u64) {
    const WINDOW: u64 = 4;
    /// Snapshots that stay: each comes to hold as much as the volume.
    const KEPT: usize = 2;
    let size = size / 4;
    let bench = Bench::new(&format!("ram:{}MiB?populate=yes", 12 * size / MIB), 2);
    let volume = bench.full_volume("v", size);
    let (mut ratio, mut fences, mut calls) = (Figure::default(), Figure::default(), Figure::default());
    let mut names = Vec::new();
    let mut taken = 0;
    let mut snapshot = |names: &mut Vec<String>| {
        taken += 1;
        names.push(format!("s{taken}"));
        let started = Instant::now();
        bench.snapshot("v", &format!("s{taken}"));
        calls.add(started.elapsed().as_secs_f64() * 1e3);
        let fence = wait(bench.pool.last_fence()).expect("the pool answers").expect("there was one");
        fences.add(fence.as_secs_f64() * 1e6);
        if names.len() > KEPT {
            wait(bench.pool.delete(&names.remove(0))).expect("it is deleted");
        }
    };
    let writers = |salt: u64| -> Vec<Running> {
        let offset = |at: u64| anywhere(seed ^ salt << 32 ^ at, size);
        (0..2).map(|at| bench.start(at, &volume, Load::write(32), offset(at as u64))).collect()
    };
    let stop = |writers: Vec<Running>| {
        let mut total = Measured::none();
        writers.into_iter().for_each(|writer| total.add(&writer.stop()));
        total
    };
    for round in 0..rounds {
        let mut p99 = [0.0; 2];
        for turn in 0..2 {
            let with = (turn + round) % 2 == 1;
            let writing = writers(round);
            for _ in 0..WINDOW {
                std::thread::sleep(Duration::from_secs(1));
                if with {
                    snapshot(&mut names);
                }
            }
            p99[usize::from(with)] = stop(writing).at(0.99);
            bench.delete(&std::mem::take(&mut names));
        }
        println!("  p99 {:.1} us without, {:.1} us with a snapshot a second", p99[0], p99[1]);
        ratio.add(p99[1] / p99[0]);
    }
    // More fences than a snapshot a second gives, still under load.
    let writing = writers(rounds);
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(20));
        snapshot(&mut names);
    }
    let under_load = stop(writing);
    bench.delete(&names);
    println!("  with a snapshot each 20 ms: {:.0} k writes/s on each reactor", under_load.rate() / 1e3);
    ratio.judge("4 KiB random write p99, a snapshot per second / none", Aim::AtMost(1.2));
    fences.judge_at("fence under load on two reactors, microseconds", 0.99, Aim::AtMost(100.0));
    println!(
        "       the call took a median of {:.2} ms, the fence one of {:.0} us",
        calls.median(),
        fences.median()
    );
    drop(volume);
    bench.close();
}

/// One snapshot of 64 volumes.
fn group(rounds: u64, seed: u64, _: u64) {
    const VOLUMES: u64 = 64;
    let bench = Bench::new("ram:32GiB", 2);
    let volumes: Vec<Volume> = (0..VOLUMES).map(|n| bench.full_volume(&format!("v{n}"), 8 * MIB)).collect();
    let mut times = Figure::default();
    for round in 0..rounds * 4 {
        for (n, volume) in (0..).zip(&volumes) {
            bench.run(volume, Load::write(8), 32, anywhere(seed ^ round << 32 ^ n, 8 * MIB));
        }
        let wanted = (0..VOLUMES).map(|n| (format!("v{n}"), format!("v{n}@{round}"))).collect();
        let started = Instant::now();
        wait(bench.pool.snapshot_group(wanted)).expect("a group snapshot");
        times.add(started.elapsed().as_secs_f64() * 1e3);
    }
    times.judge("group snapshot of 64 volumes, milliseconds", Aim::AtMost(5.0));
    drop(volumes);
    bench.close();
}
