//! The queue on a real reactor against a scripted controller on a thread.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::nvme::Status;
use crate::nvme::base::nvm;
use crate::nvme::command::ReadWrite;
use crate::nvme::tcp::{self, C2hData, CapsuleCmd, CapsuleResp, CommonHeader, Digests, IcReq, IcResp, pdu};
use crate::reactor::{PollMode, ReactorConfig, Reactors};

/// A controller that greets and then runs `script` on the connection.
fn controller(script: impl FnOnce(TcpStream) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; size_of::<IcReq>()];
        stream.read_exact(&mut request).unwrap();
        stream.write_all(IcResp::new(0, Digests(0), 8192).as_bytes()).unwrap();
        script(stream);
    });
    (addr, thread)
}

fn next_command(stream: &mut TcpStream) -> Sqe {
    let mut bytes = [0; size_of::<CapsuleCmd>()];
    stream.read_exact(&mut bytes).unwrap();
    CapsuleCmd::read_from_bytes(&bytes).unwrap().sqe
}

fn answer(stream: &mut TcpStream, sqe: &Sqe, status: Status) {
    stream.write_all(CapsuleResp::new(Cqe::new(sqe.cid.get(), status)).as_bytes()).unwrap();
}

fn answer_read(stream: &mut TcpStream, sqe: &Sqe, byte: u8) {
    let mut header = C2hData::new_zeroed();
    let len = sqe.dptr.length.get();
    header.ch = CommonHeader {
        flags: tcp::flags::LAST_PDU | tcp::flags::SUCCESS,
        pdo: 24,
        plen: (24 + len).into(),
        ..CommonHeader::bare(pdu::C2H_DATA, 24)
    };
    (header.cccid, header.datal) = (sqe.cid, len.into());
    stream.write_all(header.as_bytes()).unwrap();
    stream.write_all(&vec![byte; len as usize]).unwrap();
}

/// Runs `make()` on a reactor that parks after 20 microseconds without work.
fn on_reactor<Fut: Future<Output = ()> + 'static>(make: impl FnOnce() -> Fut + Send + 'static) {
    let config = ReactorConfig { cores: vec![0], poll: PollMode::Adaptive, spin_us: 20 };
    let reactors = Reactors::start(config).unwrap();
    reactor::block_on(reactors.handles()[0].call(make)).unwrap();
    reactors.shutdown();
}

fn read() -> Sqe {
    ReadWrite::new(1, 0, 1).to_sqe(nvm::READ)
}

#[test]
fn a_parked_queue_wakes_for_a_command_and_for_its_answer() {
    let (addr, thread) = controller(|mut stream| {
        for n in 0..20 {
            let sqe = next_command(&mut stream);
            // Longer than the reactor spins: the driver is parked when the answer comes.
            std::thread::sleep(Duration::from_millis(2));
            answer_read(&mut stream, &sqe, n);
        }
    });
    on_reactor(move || async move {
        let queue = Queue::open(addr, ConnectionOptions::new(4)).await.unwrap();
        for n in 0..20 {
            let (result, data) = queue.execute(read(), Data::In(DmaBuf::zeroed(5000))).await;
            assert_eq!(result.unwrap().status(), Status::SUCCESS);
            assert!(matches!(data, Data::In(buf) if buf.iter().all(|&b| b == n) && buf.len() == 5000));
            reactor::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(queue.in_flight(), 0);
    });
    thread.join().unwrap();
}

#[test]
fn more_commands_than_slots_wait_their_turn() {
    const COMMANDS: usize = 50;
    let (addr, thread) = controller(|mut stream| {
        for _ in 0..COMMANDS {
            let sqe = next_command(&mut stream);
            answer(&mut stream, &sqe, Status::INVALID_FIELD);
        }
    });
    on_reactor(move || async move {
        let queue = Rc::new(Queue::open(addr, ConnectionOptions::new(3)).await.unwrap());
        let left = Rc::new(Cell::new(COMMANDS));
        let done = Rc::new(sync::Event::new());
        for _ in 0..COMMANDS {
            let (queue, left, done) = (Rc::clone(&queue), Rc::clone(&left), Rc::clone(&done));
            reactor::spawn(async move {
                let (result, _) = queue.execute(read(), Data::None).await;
                assert_eq!(result.unwrap().status(), Status::INVALID_FIELD);
                left.set(left.get() - 1);
                done.notify();
            });
        }
        while left.get() > 0 {
            done.wait().await;
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_lost_connection_ends_every_command_and_returns_its_buffer() {
    let (addr, thread) = controller(|mut stream| {
        next_command(&mut stream);
    });
    on_reactor(move || async move {
        let queue = Queue::open(addr, ConnectionOptions::new(4)).await.unwrap();
        let (result, data) = queue.execute(read(), Data::In(DmaBuf::zeroed(512))).await;
        assert!(matches!(result, Err(HostError::Closed | HostError::Io(_))), "{result:?}");
        assert!(matches!(data, Data::In(buf) if buf.len() == 512));
        for _ in 0..10 {
            let (result, data) = queue.execute(read(), Data::In(DmaBuf::zeroed(512))).await;
            assert!(result.is_err());
            assert!(matches!(data, Data::In(_)));
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_dropped_command_keeps_its_slot_until_the_controller_is_done() {
    let (addr, thread) = controller(|mut stream| {
        let first = next_command(&mut stream);
        std::thread::sleep(Duration::from_millis(20));
        answer_read(&mut stream, &first, 1);
        let second = next_command(&mut stream);
        answer_read(&mut stream, &second, 2);
    });
    on_reactor(move || async move {
        let queue = Queue::open(addr, ConnectionOptions::new(1)).await.unwrap();
        let soon = reactor::now() + Duration::from_millis(5);
        let dropped = queue.execute(read(), Data::In(DmaBuf::zeroed(4096)));
        assert!(reactor::with_deadline(soon, dropped).await.is_none(), "the controller is slower");
        assert_eq!(queue.in_flight(), 1);
        let (result, data) = queue.execute(read(), Data::In(DmaBuf::zeroed(4096))).await;
        result.unwrap();
        assert!(matches!(data, Data::In(buf) if buf.iter().all(|&b| b == 2)));
    });
    thread.join().unwrap();
}

#[test]
fn a_command_that_is_not_answered_ends_the_association_and_is_named() {
    const LIMIT: Duration = Duration::from_millis(200);
    let (admin_addr, admin_thread) = controller(|mut stream| {
        // An event request may wait; the command behind it is answered, and then the connection ends.
        next_command(&mut stream);
        let sqe = next_command(&mut stream);
        answer(&mut stream, &sqe, Status::SUCCESS);
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let (io_addr, io_thread) = controller(|mut stream| {
        let sqe = next_command(&mut stream);
        answer_read(&mut stream, &sqe, 1);
        // It takes everything and says nothing.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    on_reactor(move || async move {
        let admin_queue = Rc::new(Queue::open(admin_addr, ConnectionOptions::new(4)).await.unwrap());
        let io = [Queue::open(io_addr, ConnectionOptions::new(4)).await.unwrap()];
        watch(&admin_queue, &io, LIMIT);
        let events = Rc::clone(&admin_queue);
        reactor::spawn(async move {
            let request = Sqe::new(admin::ASYNC_EVENT_REQUEST, 0);
            let (result, _) = events.execute(request, Data::None).await;
            assert!(matches!(result, Err(HostError::CommandTimeout { .. })), "{result:?}");
        });
        reactor::yield_now().await;
        let (result, _) = admin_queue.execute(Sqe::new(admin::KEEP_ALIVE, 0), Data::None).await;
        result.unwrap();
        let (result, _) = io[0].execute(read(), Data::In(DmaBuf::zeroed(512))).await;
        result.unwrap();
        // Nothing is in flight but the event request: nothing is late.
        reactor::sleep(LIMIT * 2).await;
        let start = reactor::now();
        let (result, data) = io[0].execute(read(), Data::In(DmaBuf::zeroed(512))).await;
        let took = reactor::now() - start;
        assert_eq!(
            result.unwrap_err().to_string(),
            "no answer to Read (opcode 02h, namespace 1) within 200 ms; the association ends"
        );
        assert!(took >= LIMIT && took < LIMIT * 20, "{took:?}");
        assert!(matches!(data, Data::In(buf) if buf.len() == 512));
        let (result, _) = admin_queue.execute(Sqe::new(admin::KEEP_ALIVE, 0), Data::None).await;
        assert!(matches!(result, Err(HostError::CommandTimeout { command: "Read", .. })), "{result:?}");
    });
    admin_thread.join().unwrap();
    io_thread.join().unwrap();
}

#[test]
fn nobody_listens() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    on_reactor(move || async move {
        let refused = Queue::open(addr, ConnectionOptions::new(1)).await.err().unwrap();
        assert!(matches!(refused, HostError::Connect { .. }), "{refused}");
    });
}
