//! Abort: in every state that a command can be in, and what can be relied on afterwards.

use std::collections::BTreeSet;
use std::io::Read;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rimrock::device::{Device, SimDisks, SimSpec};
use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const ABORT_REQUESTED: u16 = 0x007;
const FAILED_FUSED: u16 = 0x009;
/// Long enough for what was sent to be at work, and for what should not come to have come.
const MOMENT: Duration = Duration::from_millis(50);

/// A rig whose namespace 2 is on a disk that hangs when told to.
fn hanging_rig() -> (Rig, SimDisks, Device) {
    let rig = Rig::start();
    let spec = SimSpec { size: 64 << 20, write_cache: true, latency: false, slow_reads: false };
    let disks = SimDisks::new(1, vec![spec]);
    let device = disks.open().remove(0);
    let spec = NamespaceSpec::new(Backend::Device(device.clone()), "sim");
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    (rig, disks, device)
}

/// Whether command `cid` of queue 1 was aborted.
fn abort(admin: &mut Wire, cid: u16) -> bool {
    let sqe = Sqe::new(0x08, 0).dword(10, u32::from(cid) << 16 | 1);
    let completion = admin.command(sqe, &[]);
    assert!(completion.ok() && completion.result <= 1);
    completion.result == 0
}

#[track_caller]
fn expect_silence(io: &Wire) {
    io.stream.set_read_timeout(Some(MOMENT)).unwrap();
    assert!((&io.stream).read(&mut [0]).is_err(), "nothing may come");
    io.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
}

#[track_caller]
fn expect_aborted(io: &mut Wire, cid: u16) {
    let completion = io.complete(&[]);
    assert_eq!((completion.cid, completion.code()), (cid, ABORT_REQUESTED));
    assert!(!completion.dnr(), "it may be sent again");
}

fn write(slba: u64, data: &[u8]) -> Sqe {
    Sqe::rw(1, 2, slba, (data.len() / 4096) as u32 - 1).sgl(IN_CAPSULE, data.len() as u32)
}

fn source(slba: u64) -> [u8; 32] {
    let mut source = [0; 32];
    source[8..16].copy_from_slice(&slba.to_le_bytes());
    source
}

#[test]
fn what_reads_is_aborted_at_once_however_long_its_device_takes() {
    let (rig, disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    let data = pattern(4096, 1);
    assert!(io.write(2, 0, &data).ok());
    disks.hold(true);
    let commands: [(Sqe, &[u8]); 5] = [
        (Sqe::rw(2, 2, 0, 0).sgl(TRANSPORT, 4096), &[]),
        (Sqe::rw(0x05, 2, 0, 0).sgl(IN_CAPSULE, 4096), &data),
        (Sqe::rw(0x0C, 2, 0, 99), &[]),
        (Sqe::new(0, 2), &[]),
        // It has not got beyond reading.
        (Sqe::new(0x19, 2).dword(10, 7).sgl(IN_CAPSULE, 32), &source(0)),
    ];
    for (sqe, inline) in commands {
        let cid = io.submit(sqe, inline);
        std::thread::sleep(MOMENT);
        assert!(abort(&mut admin, cid), "opcode {:#x}", sqe.0[0]);
        expect_aborted(&mut io, cid);
        // It has been answered: there is nothing to abort.
        assert!(!abort(&mut admin, cid));
    }
    // Its late end is heard by nobody, and its identifiers are free.
    disks.hold(false);
    expect_silence(&io);
    assert_eq!(io.read(2, 0, 4096).expect_ok(), data);
    assert_eq!(io.read(2, 7, 4096).expect_ok(), [0; 4096], "the copy has not been made");
    rig.check_health();
}

#[test]
fn a_write_that_its_device_may_have_is_not_aborted() {
    let (rig, disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    let data = pattern(4096, 1);
    disks.hold(true);
    let commands: [(Sqe, &[u8]); 3] = [
        (write(0, &data), &data),
        (Sqe::rw(0x08, 2, 1, 3), &[]),
        (Sqe::new(0x09, 2).dword(11, 4).sgl(IN_CAPSULE, 16), &[0; 16]),
    ];
    let mut cids = BTreeSet::new();
    for (sqe, inline) in &commands[..2] {
        let cid = io.submit(*sqe, inline);
        std::thread::sleep(MOMENT);
        assert!(!abort(&mut admin, cid) && !abort(&mut admin, cid), "opcode {:#x}", sqe.0[0]);
        cids.insert(cid);
    }
    expect_silence(&io);
    disks.hold(false);
    // They end with what became of them.
    for _ in 0..2 {
        let completion = io.complete(&[]);
        assert!(completion.ok() && cids.remove(&completion.cid));
    }
    assert_eq!(io.read(2, 0, 4096).expect_ok(), data);
    // Nothing of a list of ranges has to be given back to the end: what is left is left.
    let mut list = Vec::new();
    for slba in [0u64, 9] {
        let mut range = [0; 16];
        range[4] = 1;
        range[8..].copy_from_slice(&slba.to_le_bytes());
        list.extend(range);
    }
    assert!(io.command(write(9, &data), &data).ok());
    disks.hold(true);
    let cid = io.submit(Sqe::new(0x09, 2).dword(10, 1).dword(11, 4).sgl(IN_CAPSULE, 32), &list);
    std::thread::sleep(MOMENT);
    assert!(!abort(&mut admin, cid), "the first range is being given back");
    disks.hold(false);
    expect_aborted(&mut io, cid);
    assert_eq!(io.read(2, 0, 4096).expect_ok(), [0; 4096]);
    assert_eq!(io.read(2, 9, 4096).expect_ok(), data);
    rig.check_health();
}

#[test]
fn a_change_that_has_not_begun_is_aborted_and_never_lands() {
    let (rig, disks, device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    let old = pattern(8192, 1);
    assert!(io.write(2, 0, &old).ok());
    // Somebody has claimed the range, so every change of it waits.
    let mut claim = Box::pin(device.gate().claim(0..8192));
    let Poll::Ready(claimed) = claim.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("nobody writes")
    };
    let new = pattern(8192, 99);
    let mut compare = Sqe::rw(0x05, 2, 0, 1).sgl(IN_CAPSULE, 8192);
    compare.0[1] |= 1;
    let mut second = write(0, &new);
    second.0[1] |= 2;
    let commands: [(Sqe, &[u8]); 4] = [
        (write(0, &new), &new),
        (Sqe::rw(0x08, 2, 0, 1), &[]),
        (Sqe::new(0x19, 2).sgl(IN_CAPSULE, 32), &source(50)),
        (
            Sqe::new(0x09, 2).dword(11, 4).sgl(IN_CAPSULE, 16),
            &[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ),
    ];
    for (sqe, inline) in commands {
        let cid = io.submit(sqe, inline);
        std::thread::sleep(MOMENT);
        assert!(abort(&mut admin, cid), "opcode {:#x}", sqe.0[0]);
        expect_aborted(&mut io, cid);
    }
    // A pair goes as a whole, whichever half is named.
    for half in [0, 1] {
        let cids = [io.submit(compare, &old), io.submit(second, &new)];
        std::thread::sleep(MOMENT);
        assert!(abort(&mut admin, cids[half]));
        for (i, cid) in cids.into_iter().enumerate() {
            let completion = io.complete(&[]);
            let expected = if i == half { ABORT_REQUESTED } else { FAILED_FUSED };
            assert_eq!((completion.cid, completion.code()), (cid, expected));
        }
    }
    drop(claimed);
    expect_silence(&io);
    assert_eq!(io.read(2, 0, 8192).expect_ok(), old);
    assert!(io.write(2, 0, &new).ok());
    assert_eq!(io.read(2, 0, 8192).expect_ok(), new);
    drop(disks);
    rig.check_health();
}

#[test]
fn halves_that_wait_are_aborted() {
    let (rig, _disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    let half = |opcode, fuse, kind| {
        let mut sqe = Sqe::rw(opcode, 2, 0, 0).sgl(kind, 4096);
        sqe.0[1] |= fuse;
        sqe
    };
    // The first alone; the second then fails with it.
    let first = io.submit(half(0x05, 1, IN_CAPSULE), &[0; 4096]);
    std::thread::sleep(MOMENT);
    assert!(abort(&mut admin, first));
    expect_aborted(&mut io, first);
    io.submit(half(0x01, 2, IN_CAPSULE), &[1; 4096]);
    assert_eq!(io.complete(&[]).code(), FAILED_FUSED);
    // Both, while their data is under way; what comes late goes nowhere.
    let cids = [io.submit(half(0x05, 1, TRANSPORT), &[]), io.submit(half(0x01, 2, TRANSPORT), &[])];
    let r2ts = [io.expect(9), io.expect(9)];
    let tags = r2ts.map(|r2t| (r2t.u16(8), r2t.u16(10)));
    assert_eq!(tags.map(|(cid, _)| cid), cids);
    assert!(abort(&mut admin, cids[1]));
    let codes = [io.complete(&[]), io.complete(&[])].map(|completion| (completion.cid, completion.code()));
    assert_eq!(codes, [(cids[0], FAILED_FUSED), (cids[1], ABORT_REQUESTED)]);
    for (cid, ttag) in tags {
        io.send_host_data(cid, ttag, 0, &[9; 4096], 4096);
    }
    assert_eq!(io.read(2, 0, 4096).expect_ok(), [0; 4096]);
    rig.check_health();
}

#[test]
fn what_waits_for_memory_is_aborted() {
    let (rig, disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    disks.hold(true);
    // More than any queue gets at the same time.
    let reads: Vec<u16> =
        (0..96).map(|_| io.submit(Sqe::rw(2, 2, 0, 255).sgl(TRANSPORT, 1 << 20), &[])).collect();
    let copy = io.submit(Sqe::new(0x19, 2).dword(10, 7).sgl(IN_CAPSULE, 32), &source(0));
    let verify = io.submit(Sqe::rw(0x0C, 2, 0, 0), &[]);
    std::thread::sleep(MOMENT);
    for cid in reads.into_iter().rev().chain([copy, verify]) {
        assert!(abort(&mut admin, cid));
        expect_aborted(&mut io, cid);
    }
    disks.hold(false);
    expect_silence(&io);
    for _ in 0..64 {
        assert_eq!(io.read(2, 0, 1 << 20).expect_ok().len(), 1 << 20);
    }
    rig.check_health();
}

#[test]
fn commands_that_were_aborted_but_run_on_still_count() {
    const DEPTH: u16 = 16;
    let (rig, disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect_as(HOSTNQN, DEPTH);
    disks.hold(true);
    for _ in 0..2 * DEPTH {
        let cid = io.submit(Sqe::rw(2, 2, 0, 0).sgl(TRANSPORT, 4096), &[]);
        while !abort(&mut admin, cid) {
            // It has not come yet.
            std::thread::sleep(Duration::from_millis(1));
        }
        expect_aborted(&mut io, cid);
    }
    // The device has as many as a queue may give it: the next waits, whomever it is for.
    let cid = io.submit(Sqe::rw(2, 1, 0, 0).sgl(TRANSPORT, 4096), &[]);
    expect_silence(&io);
    disks.hold(false);
    assert_eq!(io.complete(&[]).cid, cid);
    rig.check_health();
}

#[test]
fn a_connection_whose_aborted_commands_still_run_ends_when_they_do() {
    let (rig, disks, _device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    disks.hold(true);
    let cid = io.submit(Sqe::rw(2, 2, 0, 0).sgl(TRANSPORT, 4096), &[]);
    std::thread::sleep(MOMENT);
    assert!(abort(&mut admin, cid));
    io.reset();
    drop((io, admin));
    std::thread::sleep(MOMENT);
    assert!(rig.target.connection_count() > 0, "its memory is the device's");
    disks.hold(false);
    rig.await_connections(0);
    rig.check_health();
}

#[test]
fn an_admin_command_whose_data_is_under_way_is_aborted() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    // Timestamp, with its eight bytes asked for.
    let cid = admin.submit(Sqe::new(0x09, 0).dword(10, 0x0E).sgl(TRANSPORT, 8), &[]);
    let r2t = admin.expect(9);
    assert_eq!(r2t.u16(8), cid);
    let sent = admin.submit(Sqe::new(0x08, 0).dword(10, u32::from(cid) << 16), &[]);
    let (ended, aborted) = (admin.complete(&[]), admin.complete(&[]));
    assert_eq!((ended.cid, ended.code()), (cid, ABORT_REQUESTED));
    assert_eq!((aborted.cid, aborted.code(), aborted.result), (sent, 0, 0));
    let late = admin.h2c_data(cid, r2t.u16(10), 0, &[1; 8], true);
    admin.send(&late);
    assert!(admin.command(Sqe::new(0x18, 0), &[]).ok(), "the connection stays");
    rig.check_health();
}

#[test]
fn a_storm_of_aborts_leaves_every_byte_where_the_answers_say() {
    let (rig, _disks, device) = hanging_rig();
    let (mut admin, mut io) = rig.connect();
    let mut content = pattern(4096, 0);
    assert!(io.write(2, 0, &content).ok());
    let (mut aborted, mut written) = (0, 0);
    for round in 1..400u32 {
        // Now and then the write finds the range claimed, so that the abort comes first.
        let gate = device.gate();
        let mut claim: Pin<Box<dyn Future<Output = _> + '_>> = Box::pin(gate.claim(0..4096));
        let claimed = match claim.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(claimed) if round % 3 == 0 => Some(claimed),
            _ => None,
        };
        drop(claim);
        let new = pattern(4096, round as u8);
        let cid = io.submit(write(0, &new), &new);
        let was_aborted = abort(&mut admin, cid);
        drop(claimed);
        let completion = io.complete(&[]);
        assert_eq!(completion.cid, cid);
        match completion.code() {
            ABORT_REQUESTED => {
                assert!(was_aborted, "round {round}");
                aborted += 1;
            }
            code => {
                assert_eq!((code, was_aborted), (0, false), "round {round}");
                written += 1;
                content = new;
            }
        }
        assert!(io.read(2, 0, 4096).expect_ok() == content, "round {round}");
    }
    assert!(aborted > 50 && written > 50, "{aborted} aborted, {written} written");
    rig.check_health();
}
