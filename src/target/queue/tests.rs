//! The time limits of a queue, on a clock of the test's own.
#![forbid(unsafe_code)]

use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::nvme::base::SglDescriptor;
use crate::nvme::fabrics::{Cc, ConnectAttributes, ConnectCommand, PropertyCommand, property};
use crate::nvme::nqn::Nqn;
use crate::nvme::tcp::{CapsuleCmd, CommonHeader, Digests, IcReq, pdu};
use crate::target::Target;

fn new_queue(now: Instant) -> Queue {
    let target = Target::new(Vec::new());
    let addr = SocketAddr::from(([127, 0, 0, 1], 4420));
    let endpoint = Endpoint {
        shared: Arc::clone(target.shared()),
        options: target.shared().options(),
        listener: addr,
        local: addr,
        peer: addr,
        reactor: 0,
        inbox: Arc::default(),
    };
    let mut queue = Queue::new(endpoint, now);
    feed(&mut queue, IcReq::new(0, Digests(0), 0).as_bytes(), now);
    queue
}

fn feed(queue: &mut Queue, bytes: &[u8], now: Instant) -> usize {
    queue.turn(now);
    let done = queue.receive(&DmaSlice::copy_of(bytes), 0, now);
    queue.judge(now);
    done
}

fn take_answers(queue: &mut Queue) -> usize {
    let pending = queue.conn.transmit().pending();
    queue.conn.transmit().advance(pending);
    pending
}

fn capsule(sqe: &Sqe, data: &[u8]) -> Vec<u8> {
    let mut header = CapsuleCmd::new_zeroed();
    header.ch = CommonHeader::bare(pdu::CAPSULE_CMD, size_of::<CapsuleCmd>());
    if !data.is_empty() {
        header.ch.pdo = size_of::<CapsuleCmd>() as u8;
        header.ch.plen = ((size_of::<CapsuleCmd>() + data.len()) as u32).into();
    }
    header.sqe = *sqe;
    [header.as_bytes(), data].concat()
}

fn connect(subnqn: &str, kato_ms: u32) -> Vec<u8> {
    let mut sqe = ConnectCommand::new(0, 32, ConnectAttributes(0), kato_ms).to_sqe();
    sqe.dptr = SglDescriptor::in_capsule(0, size_of::<ConnectData>() as u32);
    let data = ConnectData::new([7; 16], 0xFFFF, subnqn, "nqn.2024-01.org.example:host");
    capsule(&sqe, data.as_bytes())
}

/// An enabled discovery controller.
fn discovery(now: Instant, kato_ms: u32) -> Queue {
    let mut queue = new_queue(now);
    feed(&mut queue, &connect(Nqn::discovery().as_str(), kato_ms), now);
    let enable = PropertyCommand::set(property::CC, Cc::ENABLE.0.into()).to_sqe();
    feed(&mut queue, &capsule(&enable, &[]), now);
    assert_eq!((queue.qid(), queue.ending()), (Some(0), Ending::Open));
    take_answers(&mut queue);
    queue
}

fn log_page(dwords: u32) -> Vec<u8> {
    let mut sqe = Sqe::new(0x02, 0);
    sqe.cdw10 = (0x70 | ((dwords - 1) & 0xFFFF) << 16).into();
    sqe.cdw11 = ((dwords - 1) >> 16).into();
    sqe.dptr = SglDescriptor::transport(dwords * 4);
    capsule(&sqe, &[])
}

#[test]
fn connects_that_are_refused_do_not_buy_time() {
    let start = Instant::now();
    let mut queue = new_queue(start);
    for second in 1..30 {
        let now = start + Duration::from_secs(second);
        feed(&mut queue, &connect("nqn.2024-01.org.example:none", 0), now);
        assert_eq!((queue.ending(), queue.deadline()), (Ending::Open, Some(start + CONNECT_LIMIT)));
        take_answers(&mut queue);
    }
    feed(&mut queue, &[], start + CONNECT_LIMIT);
    assert_eq!(queue.ending(), Ending::Now);
}

#[test]
fn answers_that_are_not_taken_stop_further_commands_and_end_the_connection_in_time() {
    let start = Instant::now();
    let mut queue = discovery(start, 0);
    // One receive buffer full of requests for 1 MiB each.
    let flood = log_page(1 << 18).repeat(3640);
    let done = feed(&mut queue, &flood, start);
    assert!(done < flood.len() && queue.is_blocked());
    assert!(queue.conn.transmit().pending() <= 2 * ANSWERS_MAX + 4096);
    assert!(queue.conn.transmit().pending_copied() < 64 << 10);
    take_answers(&mut queue);
    assert!(queue.has_room(&flood[done..], start), "it goes on when they are");
    feed(&mut queue, &flood[done..], start);
    // A byte now and then is not enough. What was taken before counts for the first minute.
    for second in (0..120).step_by(10) {
        feed(&mut queue, &[], start + Duration::from_secs(second));
        assert_eq!(queue.ending(), Ending::Open, "after {second} s");
        queue.conn.transmit().advance(1);
    }
    feed(&mut queue, &[], start + Duration::from_secs(120));
    assert_eq!(queue.ending(), Ending::Now);
}

#[test]
fn an_association_expires_after_two_intervals_and_not_over_a_command_that_is_here() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let kato = 1000;
    let keep_alive = capsule(&Sqe::new(0x18, 0), &[]);
    let mut queue = discovery(start, kato);
    feed(&mut queue, &[], at(1900));
    assert_eq!(queue.ending(), Ending::Open, "one interval of grace");
    // It came in time and is looked at late.
    queue.turn(at(2500));
    queue.receive(&DmaSlice::copy_of(&keep_alive), 0, at(2500));
    queue.judge(at(2500));
    assert_eq!(queue.ending(), Ending::Open);
    take_answers(&mut queue);
    assert!(queue.deadline().is_some_and(|deadline| deadline >= at(4499)));
    feed(&mut queue, &[], at(4600));
    assert_eq!(queue.ending(), Ending::Now);
}

#[test]
fn a_pdu_that_is_never_finished_ends_the_connection() {
    let start = Instant::now();
    let mut queue = discovery(start, 0);
    let pdu = log_page(1);
    for second in [0, 20, 40, 59] {
        feed(&mut queue, &pdu[..20], start + Duration::from_secs(second));
        assert_eq!(queue.ending(), Ending::Open);
    }
    assert_eq!(queue.deadline(), Some(start + PDU_LIMIT));
    queue.judge(start + PDU_LIMIT);
    assert_eq!(queue.ending(), Ending::Now);
}
