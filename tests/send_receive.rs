//! Snapshots sent from one daemon and received by another: what comes is what went, and whatever goes wrong leaves nothing.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, free_port, rimrock};
use nix::sys::signal::Signal;
use rimrock::host::{ControllerOptions, Namespace, blocking};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes of a header with names as short as those here, and of a record and the end without data.
const RECORD: usize = 40;

fn daemon_with(device: &str) -> Daemon {
    let port = free_port();
    Daemon::start_with(Some(&format!(
        "[target]\nlisten = \"127.0.0.1:{port}\"\n\
         [[device]]\nname = \"disk\"\nuri = \"{device}\"\n\
         [[pool]]\nname = \"main\"\ndevices = [\"disk\"]\ncreate = true\n"
    )))
}

fn two() -> (Daemon, Daemon) {
    (daemon_with("ram:512MiB"), daemon_with("ram:512MiB"))
}

/// A volume or snapshot under a host's hands.
struct Disk {
    controller: blocking::BlockingController,
    namespace: Namespace,
}

impl Disk {
    fn open(daemon: &Daemon, name: &str) -> Disk {
        let exported = daemon.call("volume_export", json!({ "name": name }));
        let address = exported["listen"][0].as_str().unwrap().parse().unwrap();
        let options = ControllerOptions::new(uuid::Uuid::new_v4());
        let controller = blocking::connect(address, exported["nqn"].as_str().unwrap(), &options).unwrap();
        let nsid = exported["nsid"].as_u64().unwrap() as u32;
        let namespace = blocking::now(controller.namespace(nsid)).unwrap();
        Disk { controller, namespace }
    }

    fn block(&self) -> u64 {
        u64::from(self.namespace.block_bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        for (at, part) in (offset..).step_by(MIB as usize).zip(bytes.chunks(MIB as usize)) {
            let write = self.controller.write(&self.namespace, at / self.block(), part.to_vec(), false);
            blocking::now(write).unwrap();
        }
    }

    fn trim(&self, offset: u64, length: u64) {
        let range = (offset / self.block(), (length / self.block()) as u32);
        blocking::now(self.controller.deallocate(&self.namespace, &[range])).unwrap();
    }

    fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let read = self.controller.read(&self.namespace, offset / self.block(), vec![0; length]);
        let (result, bytes) = blocking::now(read);
        result.unwrap();
        bytes
    }

    fn size(&self) -> u64 {
        self.namespace.blocks * self.block()
    }
}

/// Bytes that no other write has.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(length).collect()
}

/// All of a snapshot's bytes, and its end of being exported.
fn content(daemon: &Daemon, name: &str) -> Vec<u8> {
    let disk = Disk::open(daemon, name);
    let bytes = (0..disk.size()).step_by(MIB as usize).flat_map(|at| disk.read(at, MIB as usize)).collect();
    drop(disk);
    daemon.call("volume_unexport", json!({ "name": name }));
    bytes
}

fn snapshot(daemon: &Daemon, name: &str) {
    let volume = name.split('@').next().unwrap();
    daemon.call("snapshot_create", json!({ "volume": volume, "name": name }));
}

fn send(daemon: &Daemon, arguments: &[&str]) -> Vec<u8> {
    let output = daemon.cli(&[&["snapshot", "send"], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn receiver(daemon: &Daemon, arguments: &[&str]) -> Child {
    let mut command = rimrock();
    command.arg("--socket").arg(daemon.socket()).args(["-o", "json", "snapshot", "receive"]).args(arguments);
    spawn(&mut command)
}

fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn receive(daemon: &Daemon, stream: &[u8], arguments: &[&str]) -> Output {
    let mut child = receiver(daemon, arguments);
    // One that refuses the stream does not read it to its end.
    let _ = child.stdin.take().unwrap().write_all(stream);
    child.wait_with_output().unwrap()
}

fn received(daemon: &Daemon, stream: &[u8], arguments: &[&str]) -> Value {
    let output = receive(daemon, stream, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Why a stream was refused.
fn refused(daemon: &Daemon, stream: &[u8], arguments: &[&str]) -> String {
    let output = receive(daemon, stream, arguments);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what} does not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn transfers(daemon: &Daemon) -> usize {
    daemon.call("snapshot_transfer_list", Value::Null).as_array().unwrap().len()
}

fn names(daemon: &Daemon, method: &str) -> Vec<String> {
    let all = daemon.call(method, Value::Null);
    all.as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until a pool holds `allocated` bytes of data and nothing else goes on, and has it checked.
fn assert_left(daemon: &Daemon, allocated: u64) {
    let started = Instant::now();
    loop {
        let pool = daemon.call("pool_get", json!({ "name": "main" }));
        if transfers(daemon) == 0 && pool["deleting"] == 0 && pool["allocated"] == allocated {
            break;
        }
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{allocated} bytes should be left: {pool}\n{}",
            daemon.log()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let report = daemon.call("pool_check", json!({ "name": "main", "data": true }));
    assert_eq!(report["clean"], true, "{report}");
}

fn allocated(daemon: &Daemon) -> u64 {
    daemon.call("pool_get", json!({ "name": "main" }))["allocated"].as_u64().unwrap()
}

fn write_file(daemon: &Daemon, name: &str, bytes: &[u8]) -> PathBuf {
    let path = daemon.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_chain_of_differences_arrives_as_it_was_with_trims_and_other_sizes() {
    for block_size in [4096, 512] {
        let (here, there) = two();
        here.call("volume_create", json!({ "name": "v", "size": 8 * MIB, "block_size": block_size }));
        let disk = Disk::open(&here, "v");
        disk.write(0, &noise(1, 5 * MIB as usize));
        snapshot(&here, "v@1");
        disk.trim(MIB, 2 * MIB);
        disk.write(3 * MIB - 4096, &noise(2, 12288));
        disk.write(6 * MIB, &noise(3, block_size));
        snapshot(&here, "v@2");
        drop(disk);
        here.call("volume_resize", json!({ "name": "v", "size": 16 * MIB }));
        let disk = Disk::open(&here, "v");
        disk.write(15 * MIB, &noise(4, MIB as usize));
        snapshot(&here, "v@3");
        drop(disk);
        here.call("volume_resize", json!({ "name": "v", "size": 4 * MIB, "allow_shrink": true }));
        snapshot(&here, "v@4");
        here.call("volume_resize", json!({ "name": "v", "size": 6 * MIB }));
        snapshot(&here, "v@5");

        let full = send(&here, &["v@1"]);
        let first = received(&there, &full, &[]);
        let origin = here.call("snapshot_get", json!({ "name": "v@1" }));
        for member in ["uuid", "created", "size", "block_size", "name"] {
            assert_eq!(first[member], origin[member], "{member}");
        }
        assert_eq!(first["referenced"], 5 * MIB);
        for (from, to, name) in
            [("v@1", "v@2", "v@2"), ("v@2", "v@3", "x@3"), ("v@3", "v@4", "v@4"), ("v@4", "v@5", "v@5")]
        {
            let stream = send(&here, &["--from", from, to]);
            let found = received(&there, &stream, &[name]);
            assert_eq!(found["uuid"], here.call("snapshot_get", json!({ "name": to }))["uuid"]);
            assert!(content(&here, to) == content(&there, name), "{to} has become another");
        }
        assert!(content(&here, "v@1") == content(&there, "v@1"));
        // From the first to the last in one, to a pool that has both: under another UUID it would be the same.
        let whole = send(&here, &["--from", "v@1", "v@5"]);
        assert!(refused(&there, &whole, &["y@5"]).contains("has this snapshot already, as v@5"));
        there.call("snapshot_delete", json!({ "name": "v@5" }));
        received(&there, &whole, &["y@5"]);
        assert!(content(&here, "v@5") == content(&there, "y@5"));
        assert_eq!(names(&there, "volume_list"), Vec::<String>::new());
        // What was received is a snapshot like any other, and a difference from it finds the way back.
        there.call("clone_create", json!({ "snapshot": "y@5", "name": "back" }));
        let disk = Disk::open(&there, "back");
        disk.write(0, &noise(9, 8192));
        snapshot(&there, "back@1");
        drop(disk);
        received(&here, &send(&there, &["--from", "y@5", "back@1"]), &[]);
        assert!(content(&here, "back@1") == content(&there, "back@1"));
        let left = allocated(&there);
        assert_left(&there, left);
    }
}

#[test]
fn a_large_volume_with_little_in_it_takes_little_time() {
    let (here, there) = two();
    here.call("volume_create", json!({ "name": "v", "size": 1u64 << 40 }));
    let disk = Disk::open(&here, "v");
    for at in [0, 123_456 * MIB, (1 << 40) - MIB] {
        disk.write(at, &noise(at, 4096));
    }
    drop(disk);
    snapshot(&here, "v@1");
    let started = Instant::now();
    let estimate: Value =
        serde_json::from_str(&here.cli_ok(&["-o", "json", "snapshot", "send", "v@1", "--dry-run"])).unwrap();
    let stream = send(&here, &["v@1"]);
    assert_eq!(estimate["stream_bytes"], stream.len());
    assert!(stream.len() < 16 << 10);
    let found = received(&there, &stream, &[]);
    assert_eq!((&found["size"], &found["referenced"]), (&json!(1u64 << 40), &json!(3 * 4096)));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_left(&there, 3 * 4096);
}

#[test]
fn what_cannot_be_received_is_refused_in_words_and_leaves_nothing() {
    let (here, there) = two();
    here.call("volume_create", json!({ "name": "v", "size": 8 * MIB }));
    let disk = Disk::open(&here, "v");
    disk.write(0, &noise(1, MIB as usize));
    snapshot(&here, "v@1");
    disk.write(MIB, &noise(2, 8192));
    snapshot(&here, "v@2");
    drop(disk);
    let (full, part) = (send(&here, &["v@1"]), send(&here, &["--from", "v@1", "v@2"]));
    let base = here.call("snapshot_get", json!({ "name": "v@1" }))["uuid"].as_str().unwrap().to_owned();
    let why = refused(&there, &part, &[]);
    assert!(why.contains(&base) && why.contains("does not have"), "{why}");
    there.call("volume_create", json!({ "name": "taken", "size": MIB }));
    assert!(refused(&there, &full, &["taken"]).contains("another volume named taken"));
    received(&there, &full, &["a@1"]);
    let why = refused(&there, &full, &["b@1"]);
    assert!(why.contains("has this snapshot already, as a@1"), "{why}");
    assert!(refused(&there, b"something else", &[]).contains("stream"));
    assert!(refused(&there, &full, &["nowhere/a@1"]).contains("there is no pool nowhere"));
    // Volumes change, and what is not there cannot be sent.
    for (arguments, wanted) in [
        (&["v"][..], "is a volume"),
        (&["v@9"], "there is no volume or snapshot v@9"),
        (&["--from", "v@1", "v@1"], "is the snapshot itself"),
    ] {
        let output = here.cli(&[&["snapshot", "send"], arguments].concat());
        let why = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && why.contains(wanted), "{why}");
        assert!(output.stdout.is_empty());
    }
    assert_left(&there, MIB);
    assert_eq!(names(&there, "snapshot_list"), ["a@1"]);
}

#[test]
fn a_stream_that_was_cut_or_flipped_anywhere_is_never_visible() {
    let (here, there) = two();
    here.call("volume_create", json!({ "name": "v", "size": 8 * MIB }));
    let disk = Disk::open(&here, "v");
    disk.write(4096, &noise(1, 8192));
    disk.write(MIB, &noise(2, 4096));
    snapshot(&here, "v@1");
    drop(disk);
    let stream = send(&here, &["v@1"]);
    let check = |bytes: &[u8]| {
        let path = write_file(&here, "stream", bytes);
        rimrock().args(["snapshot", "receive", "--check", text(&path)]).output().unwrap().status.code()
    };
    assert_eq!(check(&stream), Some(0));
    let length = stream.len();
    let ends = [0, 1, 127, 128, 140, length - 1, length - 64, length - 65, length - 104, length - 105];
    let more = (1..12).map(|part| part * length / 12);
    for cut in ends.into_iter().chain(more) {
        refused(&there, &stream[..cut], &[]);
        assert_eq!(check(&stream[..cut]), Some(1), "cut at {cut}");
    }
    for at in (0..40).map(|part| part * (length - 1) / 39).chain([8, 12, 80, 112, 124, 144, 144 + RECORD]) {
        let mut broken = stream.clone();
        broken[at] ^= 1 << (at % 8);
        refused(&there, &broken, &[]);
        assert_eq!(check(&broken), Some(1), "flipped at {at}");
    }
    let longer = [&stream[..], b"x"].concat();
    assert!(refused(&there, &longer, &[]).contains("something follows"));
    assert_eq!(names(&there, "snapshot_list"), Vec::<String>::new());
    assert_left(&there, 0);
    received(&there, &stream, &[]);
}

#[test]
fn what_a_header_claims_costs_nothing() {
    use rimrock::stream::{Encoder, Header};
    let (_, there) = two();
    for (size, data_bytes) in [(i64::MAX as u64 / MIB * MIB, 0), (MIB, MIB), (1 << 40, 1 << 40), (4096, 0)] {
        let header = Header {
            stream: uuid::Uuid::new_v4(),
            uuid: uuid::Uuid::new_v4(),
            base: None,
            pool: uuid::Uuid::new_v4(),
            name: "v@1".to_owned(),
            pool_name: "p".to_owned(),
            size,
            block_size: 4096,
            created: u64::MAX,
            epoch: u64::MAX,
            data_bytes,
            zero_bytes: 0,
        };
        let (_, bytes) = Encoder::new(&header).unwrap();
        refused(&there, &bytes, &[]);
    }
    assert_left(&there, 0);
}

/// Gives a receiver a part of a stream, and returns when it was written.
fn half_way(daemon: &Daemon, stream: &[u8]) -> Child {
    let mut child = receiver(daemon, &[]);
    child.stdin.as_mut().unwrap().write_all(&stream[..stream.len() / 2]).unwrap();
    wait_for("the first half", || allocated(daemon) > 8 * MIB);
    child
}

fn stream_of(mib: u64) -> Vec<u8> {
    let here = daemon_with("ram:512MiB");
    here.call("volume_create", json!({ "name": "v", "size": mib * MIB }));
    let disk = Disk::open(&here, "v");
    disk.write(0, &noise(5, (mib * MIB) as usize));
    snapshot(&here, "v@1");
    drop(disk);
    send(&here, &["v@1"])
}

#[test]
fn kills_in_the_middle_leave_nothing_and_the_space_comes_back() {
    let stream = stream_of(32);
    let mut there = daemon_with("uring:DIR/pool.img?size=256MiB");
    let mut child = half_way(&there, &stream);
    // Nobody sees it: not by name, not in a list, not as a subsystem.
    assert_eq!(names(&there, "volume_list").len() + names(&there, "snapshot_list").len(), 0);
    assert_eq!(there.call("nvmf_get_subsystems", Value::Null).as_array().unwrap().len(), 1);
    assert_eq!(there.call("pool_get", json!({ "name": "main" }))["volumes"], 0);
    let error = there.refused("pool_export", json!({ "name": "main" }));
    assert!(error["message"].as_str().unwrap().contains("v@1 is being received by process"), "{error}");
    assert!(refused(&there, &stream, &[]).contains("is being received by process"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_left(&there, 0);

    let mut child = half_way(&there, &stream);
    there.signal(Signal::SIGKILL);
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    there.restart();
    assert_left(&there, 0);
    assert_eq!(names(&there, "snapshot_list"), Vec::<String>::new());

    // A clean stop takes it along at once.
    let child = half_way(&there, &stream);
    assert!(there.signal(Signal::SIGTERM).success(), "{}", there.log());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(1));
    there.restart();
    assert_left(&there, 0);
    received(&there, &stream, &[]);
    there.signal(Signal::SIGKILL);
    there.restart();
    assert_eq!(names(&there, "snapshot_list"), ["v@1"]);
    assert_left(&there, 32 * MIB);
}

#[test]
fn a_pool_without_room_says_so_before_or_in_the_middle() {
    let stream = stream_of(96);
    let there = daemon_with("ram:96MiB");
    assert!(refused(&there, &stream, &[]).contains("has room for"));
    let there = daemon_with("ram:160MiB");
    let mut child = half_way(&there, &stream);
    there.call("volume_create", json!({ "name": "other", "size": 512 * MIB }));
    let disk = Disk::open(&there, "other");
    let fill = |at: u64| {
        let write = disk.controller.write(&disk.namespace, at * 256, noise(at, MIB as usize), false);
        blocking::now(write).is_ok()
    };
    let filled = (0..512).take_while(|at| fill(*at)).count() as u64;
    let _ = child.stdin.take().unwrap().write_all(&stream[stream.len() / 2..]);
    let output = child.wait_with_output().unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && why.contains("the pool is full"), "{why}");
    drop(disk);
    assert!(filled > 0 && filled < 512);
    wait_for("the end", || transfers(&there) == 0);
    assert_eq!(names(&there, "snapshot_list"), Vec::<String>::new());
    let left = there.call("volume_get", json!({ "name": "other" }))["referenced"].as_u64().unwrap();
    assert_left(&there, left);
}

#[test]
fn what_is_being_sent_stays_while_its_volume_is_written_over() {
    let (here, there) = two();
    here.call("volume_create", json!({ "name": "v", "size": 32 * MIB }));
    let disk = Disk::open(&here, "v");
    snapshot(&here, "v@0");
    let before = noise(1, 32 * MIB as usize);
    disk.write(0, &before);
    snapshot(&here, "v@1");
    let mut sender = rimrock();
    sender.arg("--socket").arg(here.socket()).args(["snapshot", "send", "--from", "v@0", "v@1"]);
    let mut child = spawn(&mut sender);
    let mut stream = vec![0; 4096];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut stream).unwrap();
    // The pipe is full now, and the sender waits.
    for name in ["v@0", "v@1"] {
        let error = here.refused("snapshot_delete", json!({ "name": name }));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("v@1 is being sent by process {}", child.id())), "{error}");
        let by = here.call("snapshot_get", json!({ "name": name }))["pinned_by"].clone();
        assert_eq!(by, json!([format!("process {}", child.id())]));
    }
    disk.write(0, &noise(2, 32 * MIB as usize));
    disk.trim(0, 16 * MIB);
    out.read_to_end(&mut stream).unwrap();
    assert!(child.wait().unwrap().success());
    wait_for("the end", || transfers(&here) == 0);
    // As a difference it needs the base; as a whole it is the same.
    assert!(refused(&there, &stream, &[]).contains("does not have"));
    received(&there, &send(&here, &["v@0"]), &[]);
    received(&there, &stream, &[]);
    assert!(content(&there, "v@1") == before);
    drop(disk);
    here.call("snapshot_delete", json!({ "name": "v@1" }));
}

#[test]
fn a_reader_that_closes_early_ends_the_sender_at_once() {
    let (here, _) = two();
    here.call("volume_create", json!({ "name": "v", "size": 32 * MIB }));
    let disk = Disk::open(&here, "v");
    disk.write(0, &noise(1, 32 * MIB as usize));
    snapshot(&here, "v@1");
    drop(disk);
    let mut sender = rimrock();
    sender.arg("--socket").arg(here.socket()).args(["snapshot", "send", "v@1"]);
    let mut child = spawn(&mut sender);
    let mut first = [0; 1000];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), why.lines().count()), (Some(1), 1), "{why}");
    wait_for("the end", || transfers(&here) == 0);
    here.call("snapshot_delete", json!({ "name": "v@1" }));
}

#[test]
fn a_file_has_its_name_only_when_it_is_whole() {
    let (here, there) = two();
    here.call("volume_create", json!({ "name": "v", "size": 8 * MIB }));
    let disk = Disk::open(&here, "v");
    disk.write(0, &noise(1, MIB as usize));
    snapshot(&here, "v@1");
    drop(disk);
    let path = here.path().join("stream");
    let sent = here.cli_ok(&["-o", "json", "snapshot", "send", "v@1", "--file", text(&path)]);
    let sent: Value = serde_json::from_str(&sent).unwrap();
    assert_eq!(sent["stream_bytes"], std::fs::metadata(&path).unwrap().len());
    let again = here.cli(&["snapshot", "send", "v@1", "--file", text(&path)]);
    let why = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.code() == Some(1) && why.contains("exists already"), "{why}");
    here.cli_ok(&["snapshot", "send", "v@1", "--file", text(&path), "--force", "-q"]);
    // What fails leaves the file as it was, and nothing beside it.
    let before = std::fs::read(&path).unwrap();
    assert_eq!(
        here.cli(&["snapshot", "send", "v@9", "--file", text(&path), "--force"]).status.code(),
        Some(1)
    );
    assert!(std::fs::read(&path).unwrap() == before && !here.path().join("stream.partial").exists());
    let checked =
        rimrock().args(["-o", "json", "snapshot", "receive", "--check", text(&path)]).output().unwrap();
    let checked: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!((&checked["whole"], &checked["uuid"]), (&json!(true), &sent["uuid"]));
    there.cli_ok(&["snapshot", "receive", "main/copy@1", "--file", text(&path)]);
    assert!(content(&here, "v@1") == content(&there, "copy@1"));
}
