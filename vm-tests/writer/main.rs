//! Runs inside the guest of the scenario `power-cut`: writes what can be recognised, says what is durable, and after
//! the cut reads everything and judges it.
//!
//! ```text
//! power-cut-writer write SEED RUN SOCKET DEVICE DEVICE     until it is killed; each fact is a line on standard output
//! power-cut-writer verify SEED HISTORY DEVICE DEVICE       prints `kept` facts; fails when something is lost
//! power-cut-writer snapshot SEED HISTORY VOLUME DEVICE DONE,… BEGUN,…
//! ```
//!
//! What goes out on standard output counts as heard by the world: a flush that was reported must have been real.
#![forbid(unsafe_code)]

mod plan;
mod proof;

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use plan::{BLOCK, BLOCKS, Content, Kind, Operation, Stamp, THREADS, VOLUMES};
use proof::History;

/// Bytes of one read.
const PIECE: usize = 1 << 20;
/// Snapshots of a run that stay; older ones are deleted while the load goes on.
const SNAPSHOTS_KEPT: u32 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["write", seed, run, socket, devices @ ..] => write(seed, run, socket, devices),
        ["verify", seed, history, devices @ ..] => verify(seed, history, devices),
        ["snapshot", seed, history, volume, device, done, begun] => {
            snapshot(seed, history, volume, device, done, begun)
        }
        _ => Err("usage: power-cut-writer write|verify|snapshot …".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            println!("WRONG: {what}");
            ExitCode::FAILURE
        }
    }
}

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Offset of a thread's first block on its device.
fn base(thread: usize) -> u64 {
    let before = THREADS[..thread].iter().filter(|volume| **volume == THREADS[thread]).count() as u64;
    before * BLOCKS * BLOCK as u64
}

/// One line, whole, on standard output.
fn say(line: &str) -> Outcome<()> {
    Ok(std::io::stdout().lock().write_all(format!("{line}\n").as_bytes())?)
}

/// Memory that begins where O_DIRECT wants it to.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Buffer {
        let memory = vec![0; len + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        Buffer { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// A thread's progress, as the others may see it.
#[derive(Default)]
struct Progress {
    begun: AtomicU64,
    done: AtomicU64,
}

type All = [Progress; THREADS.len()];

fn counts(all: &All, pick: impl Fn(&Progress) -> &AtomicU64) -> String {
    let numbers: Vec<String> =
        all.iter().map(|progress| pick(progress).load(Ordering::SeqCst).to_string()).collect();
    numbers.join(" ")
}

fn write(seed: &str, run: &str, socket: &str, devices: &[&str]) -> Outcome<()> {
    let (seed, run, all) = (seed.parse::<u64>()?, run.parse::<u32>()?, All::default());
    let open = |path: &str, flags| {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT | flags).open(path)
    };
    std::thread::scope(|scope| {
        for (thread, volume) in THREADS.into_iter().enumerate() {
            let all = &all;
            scope.spawn(move || {
                until_killed(|| {
                    let (file, through) = (open(devices[volume], 0)?, open(devices[volume], libc::O_DSYNC)?);
                    load(seed, run, thread, &file, &through, all)
                });
            });
        }
        scope.spawn(|| until_killed(|| snapshots(seed, run, socket, &all)));
    });
    Ok(())
}

/// Nothing may fail while the power is on: the whole program ends with the first failure.
fn until_killed(work: impl FnOnce() -> Outcome<()>) {
    if let Err(what) = work() {
        println!("WRONG: {what}");
        std::process::exit(1);
    }
}

/// One thread's operations, for ever.
fn load(seed: u64, run: u32, thread: usize, file: &File, through: &File, all: &All) -> Outcome<()> {
    let no_cache = THREADS[thread] == 1;
    if no_cache && plan::is_quiet(run) {
        return Ok(());
    }
    for number in 0.. {
        let stamp = Stamp { run, thread: thread as u32, number };
        let Operation { kind, first, count, then_flush } = plan::operation(seed, stamp);
        let offset = base(thread) + first * BLOCK as u64;
        all[thread].begun.store(number + 1, Ordering::SeqCst);
        if kind == Kind::Zero {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(file, flags, offset as i64, (count * BLOCK as u64) as i64)?;
        } else {
            let mut buffer = Buffer::new(count as usize * BLOCK);
            let data = buffer.bytes();
            for (block, bytes) in (first..).zip(data.chunks_exact_mut(BLOCK)) {
                plan::fill(seed, stamp, block, bytes);
            }
            let file = if kind == Kind::WriteThrough { through } else { file };
            file.write_all_at(data, offset)?;
        }
        all[thread].done.store(number + 1, Ordering::SeqCst);
        if kind == Kind::WriteThrough || no_cache {
            say(&format!("through {thread} {number}"))?;
        }
        if then_flush {
            // Only what had completed before the flush was asked for, and only on the volume that it was asked of.
            let mut flushed = String::from("flushed");
            for (other, progress) in all.iter().enumerate() {
                let done = progress.done.load(Ordering::SeqCst);
                let covered = if THREADS[other] == THREADS[thread] { done } else { 0 };
                flushed += &format!(" {covered}");
            }
            file.sync_data()?;
            say(&flushed)?;
        }
    }
    Ok(())
}

/// Takes snapshots of both volumes in one instant, and deletes old ones, for ever.
fn snapshots(seed: u64, run: u32, socket: &str, all: &All) -> Outcome<()> {
    let mut stream = UnixStream::connect(socket)?;
    for number in 0u32.. {
        let chance = plan::mix(seed ^ u64::from(run) << 20 ^ u64::from(number)) % 700;
        // A snapshot flushes too, so there are runs with few.
        let pause = if run % 3 == 1 { 1200 + 4 * chance } else { 200 + chance };
        std::thread::sleep(Duration::from_millis(pause));
        let members: Vec<String> = VOLUMES
            .iter()
            .map(|volume| format!(r#"{{"volume":"{volume}","name":"{volume}@{run}-{number}"}}"#))
            .collect();
        let done = counts(all, |progress| &progress.done);
        let params = format!(r#"{{"snapshots":[{}]}}"#, members.join(","));
        call(&mut stream, "snapshot_create_group", &params)?;
        say(&format!("snapshot {run}-{number} {done} {}", counts(all, |progress| &progress.begun)))?;
        if let Some(old) = number.checked_sub(SNAPSHOTS_KEPT) {
            say(&format!("deleting {run}-{old}"))?;
            for volume in VOLUMES {
                let params = format!(r#"{{"name":"{volume}@{run}-{old}"}}"#);
                call(&mut stream, "snapshot_delete", &params)?;
            }
        }
    }
    Ok(())
}

/// One call of the control socket that must succeed. An answer is a line.
fn call(stream: &mut UnixStream, method: &str, params: &str) -> Outcome<()> {
    let request = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#);
    stream.write_all(request.as_bytes())?;
    let (mut answer, mut byte) = (Vec::new(), [0]);
    while answer.last() != Some(&b'\n') {
        stream.read_exact(&mut byte)?;
        answer.push(byte[0]);
    }
    let answer = String::from_utf8_lossy(&answer);
    match answer.contains(r#""error":"#) {
        true => Err(format!("{method} {params}: {answer}").into()),
        false => Ok(()),
    }
}

/// What a thread's blocks hold on a device.
fn contents(seed: u64, device: &File, thread: usize) -> Outcome<Vec<Content>> {
    let mut found = Vec::with_capacity(BLOCKS as usize);
    for piece in 0..BLOCKS as usize * BLOCK / PIECE {
        let mut buffer = Buffer::new(PIECE);
        device.read_exact_at(buffer.bytes(), base(thread) + (piece * PIECE) as u64)?;
        for bytes in buffer.bytes().chunks_exact(BLOCK) {
            found.push(plan::recognise(seed, thread as u32, found.len() as u64, bytes));
        }
    }
    Ok(found)
}

fn open_to_read(path: &str) -> Outcome<File> {
    Ok(OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?)
}

fn verify(seed: &str, history: &str, devices: &[&str]) -> Outcome<()> {
    let seed = seed.parse()?;
    let history = History::parse(seed, &std::fs::read_to_string(history)?)?;
    for (thread, volume) in THREADS.into_iter().enumerate() {
        let found = contents(seed, &open_to_read(devices[volume])?, thread)?;
        for line in history.check(thread as u32, &found)? {
            say(&line)?;
        }
    }
    Ok(())
}

fn snapshot(seed: &str, history: &str, volume: &str, device: &str, done: &str, begun: &str) -> Outcome<()> {
    let (seed, volume) = (seed.parse()?, volume.parse::<usize>()?);
    let history = History::parse(seed, &std::fs::read_to_string(history)?)?;
    let numbers = |text: &str| text.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>();
    let (done, begun, device) = (numbers(done)?, numbers(begun)?, open_to_read(device)?);
    for (thread, of) in THREADS.into_iter().enumerate() {
        if of == volume {
            let found = contents(seed, &device, thread)?;
            history.check_snapshot(thread as u32, done[thread], begun[thread], &found)?;
        }
    }
    Ok(())
}
