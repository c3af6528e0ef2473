//! A pool on a file, through the target, against fio with io_uring and O_DIRECT on the same file.
//!
//! `cargo bench --bench fio -- FILE [rounds] [seconds]`; what the file holds is lost. In each round fio has the file
//! first, then a daemon makes a pool on it and is measured by Rimrock's initiator: a disk that drifts, drifts for both. The
//! target polls core 0, the initiator core 1; fio may use both. Everything runs at normal priority.

#[path = "../tests/daemon/mod.rs"]
mod daemon;

use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use rimrock::host::bench::{self, BenchSpec, Workload};
use serde_json::{Value, json};

const FILE_BYTES: u64 = 6 << 30;
/// What both sides touch: of the file, or of a volume, which lies in about the same part of the file. A disk behind caches
/// is the faster the less of it is touched.
const RANGE_BYTES: u64 = 4 << 30;
const OFFSET_BYTES: u64 = 256 << 20;

/// Workload, bytes of an I/O, queue depth.
type Case = (&'static str, usize, u16);
/// The last one writes where the one before it has left what is free in pieces.
const CASES: [Case; 4] =
    [("randread", 4096, 32), ("write", 1 << 20, 8), ("randwrite", 4096, 32), ("write", 1 << 20, 8)];

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let Some(path) = arguments.next() else {
        return println!("needs the path of a file on a disk: cargo bench --bench fio -- /data/bench.img");
    };
    let rounds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(3);
    let seconds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(4);
    fill(&path);
    let mut ratios = CASES.map(|_| Vec::new());
    println!("{:10} {:>8} {:>3}  {:>11} {:>11} {:>6}", "workload", "bytes", "QD", "fio", "Rimrock", "ratio");
    for _ in 0..rounds {
        let peer = CASES.map(|case| fio(&path, case, seconds));
        let ours = rimrock(&path, seconds);
        for (at, (name, bytes, depth)) in CASES.into_iter().enumerate() {
            let ratio = ours[at] / peer[at];
            println!(
                "{name:10} {bytes:8} {depth:3}  {:6.0} IOPS {:6.0} IOPS {ratio:6.2}",
                peer[at], ours[at]
            );
            ratios[at].push(ratio);
        }
    }
    for (ratios, (name, bytes, depth)) in ratios.iter_mut().zip(CASES) {
        ratios.sort_by(f64::total_cmp);
        println!("{name} {bytes} B QD {depth}: median of {rounds} rounds {:.2}", ratios[ratios.len() / 2]);
    }
}

/// Every block written once, so that neither side pays for allocating the file.
fn fill(path: &str) {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(false).open(path).expect("the file opens");
    let piece: Vec<u8> = (0..4u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for _ in 0..FILE_BYTES / piece.len() as u64 {
        file.write_all(&piece).expect("the disk has room");
    }
    file.sync_all().expect("the disk takes it");
}

fn fio(path: &str, (name, bytes, depth): Case, seconds: u64) -> f64 {
    let output = Command::new("fio")
        .args(["--name=peer", "--ioengine=io_uring", "--direct=1", "--time_based", "--ramp_time=1"])
        .arg(format!("--filename={path}"))
        .arg(format!("--offset={OFFSET_BYTES}"))
        .arg(format!("--size={RANGE_BYTES}"))
        .arg(format!("--rw={name}"))
        .arg(format!("--bs={bytes}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={seconds}"))
        .args([
            "--registerfiles=1",
            "--fixedbufs=1",
            "--randrepeat=0",
            "--norandommap=1",
            "--output-format=json",
        ])
        .output()
        .expect("fio is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value =
        serde_json::from_str(&text[text.find('{').expect("fio reports")..]).expect("fio's JSON");
    let side = if name.ends_with("read") { "read" } else { "write" };
    report["jobs"][0][side]["iops"].as_f64().expect("fio measured")
}

fn rimrock(path: &str, seconds: u64) -> [f64; CASES.len()] {
    let port = daemon::free_port();
    let config = format!("[reactor]\ncores = \"0\"\n[target]\nlisten = \"127.0.0.1:{port}\"\n");
    let daemon = daemon::Daemon::start_with(Some(&config));
    daemon
        .call("pool_create", json!({ "name": "bench", "devices": [format!("uring:{path}")], "force": true }));
    daemon.call("volume_create", json!({ "name": "bench", "size": RANGE_BYTES }));
    let exported = daemon.call("volume_export", json!({ "name": "bench" }));
    let nqn = exported["nqn"].as_str().expect("an NQN");
    let measure = |(name, bytes, depth): Case, duration| {
        let mut spec = BenchSpec::new(SocketAddr::from(([127, 0, 0, 1], port)), nqn);
        spec.workload = name.parse::<Workload>().expect("a workload");
        spec.block_bytes = bytes;
        spec.queue_depth = depth;
        spec.warmup = Duration::from_secs(1);
        spec.duration = duration;
        spec.core = Some(1);
        bench::run(spec).expect("the target answers").total.iops
    };
    // The volume is written once before it is read at random.
    measure(("write", 1 << 20, 8), Duration::from_secs(5));
    CASES.map(|case| measure(case, Duration::from_secs(seconds)))
}
