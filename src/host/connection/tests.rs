//! The machine against a scripted controller: what it accepts, what it answers, and that nothing makes it panic.
#![forbid(unsafe_code)]

use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::*;
use crate::nvme::base::nvm;
use crate::nvme::command::ReadWrite;
use crate::nvme::tcp::{C2hData, CapsuleResp, IcResp, MAXH2CDATA_MIN, R2t, flags};
use crate::nvme::{Status, U16, U32};

type Conn = Connection<Vec<u8>, Vec<u8>>;

/// All that waits to be sent, taken in pieces of at most `piece` bytes.
fn sent(conn: &mut Conn, piece: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while conn.has_transmit() {
        let before = out.len();
        let mut slices = [IoSlice::new(&[]); 3];
        let used = conn.transmit_slices(&mut slices);
        for slice in &slices[..used] {
            let room = piece - (out.len() - before);
            out.extend(&slice[..slice.len().min(room)]);
        }
        conn.on_transmitted(out.len() - before);
    }
    out
}

/// Feeds bytes as a socket would that returns at most `piece` bytes per call.
fn feed(conn: &mut Conn, mut bytes: &[u8], piece: usize) -> Result<(), ProtocolError> {
    while !bytes.is_empty() {
        let mut n = 0;
        for mut slice in conn.receive_slices() {
            let take = slice.len().min(bytes.len() - n).min(piece - n);
            slice[..take].copy_from_slice(&bytes[n..n + take]);
            n += take;
        }
        conn.on_received(n)?;
        bytes = &bytes[n..];
    }
    Ok(())
}

fn open(options: ConnectionOptions, response: IcResp) -> Conn {
    let mut conn = Conn::new(options);
    assert_eq!(sent(&mut conn, 50).len(), 128);
    feed(&mut conn, response.as_bytes(), 1000).unwrap();
    assert!(conn.is_open());
    conn
}

fn plain(depth: u16) -> Conn {
    open(ConnectionOptions::new(depth), IcResp::new(0, Digests(0), 8192))
}

fn read_command() -> Sqe {
    ReadWrite::new(1, 0, 1).to_sqe(nvm::READ)
}

fn write_command() -> Sqe {
    ReadWrite::new(1, 0, 1).to_sqe(nvm::WRITE)
}

/// A whole PDU as a controller would send it.
fn pdu_bytes(header: impl IntoBytes + Immutable, data: &[u8], digests: Digests, pda: u8) -> Vec<u8> {
    let mut bytes = header.as_bytes().to_vec();
    let hlen = bytes.len();
    let shape = PduShape::new(hlen, data.len(), digests, pda);
    let (ch, _) = CommonHeader::mut_from_prefix(&mut bytes).unwrap();
    shape.apply(ch);
    if digests.header() {
        bytes.extend(crate::crc32c::crc32c(&bytes).to_le_bytes());
    }
    if !data.is_empty() {
        bytes.resize(shape.pdo, 0);
        bytes.extend(data);
        if digests.data() {
            bytes.extend(crate::crc32c::crc32c(data).to_le_bytes());
        }
    }
    assert_eq!(bytes.len(), shape.plen);
    bytes
}

fn c2h(cid: u16, offset: u32, data: &[u8], flags: u8, digests: Digests, pda: u8) -> Vec<u8> {
    let mut header = C2hData::new_zeroed();
    header.ch = CommonHeader { flags, ..CommonHeader::bare(pdu::C2H_DATA, 24) };
    (header.cccid, header.datao, header.datal) = (cid.into(), offset.into(), (data.len() as u32).into());
    pdu_bytes(header, data, digests, pda)
}

fn response(cid: u16, status: Status) -> Vec<u8> {
    CapsuleResp::new(Cqe::new(cid, status)).as_bytes().to_vec()
}

const LAST: u8 = flags::LAST_PDU;
const SUCCESS: u8 = flags::LAST_PDU | flags::SUCCESS;

/// The FES of the termination request that waits to be sent.
fn termination(conn: &mut Conn) -> Fes {
    let bytes = sent(conn, 1000);
    let (term, quoted) = TermReq::read_from_prefix(&bytes).unwrap();
    assert_eq!(term.ch.pdu_type, pdu::H2C_TERM_REQ);
    assert_eq!(term.ch.plen.get() as usize, bytes.len());
    assert!(quoted.len() <= tcp::TERM_DATA_MAX);
    Fes(term.fes.get())
}

#[test]
fn commands_wait_for_the_controllers_greeting() {
    let mut conn = Conn::new(ConnectionOptions::new(4));
    let refused = conn.submit(read_command(), Data::In(vec![1; 9]), 7).unwrap_err();
    assert_eq!(refused.why, RefusedWhy::NotOpen);
    assert!(matches!(refused.data, Data::In(buf) if buf == [1; 9]), "the buffer comes back");
    assert_eq!(conn.granted(), None);
    let error = feed(&mut conn, &response(0, Status::SUCCESS), 100).unwrap_err();
    assert_eq!(error, ProtocolError::UnexpectedPdu { pdu_type: pdu::CAPSULE_RESP, phase: "before ICResp" });
}

#[test]
fn a_greeting_is_judged() {
    let judge = |change: fn(&mut IcResp)| {
        let mut conn = Conn::new(ConnectionOptions::new(1));
        sent(&mut conn, 1000);
        let mut resp = IcResp::new(0, Digests(0), MAXH2CDATA_MIN);
        change(&mut resp);
        let outcome = feed(&mut conn, resp.as_bytes(), 1000);
        let fes = outcome.is_err().then(|| termination(&mut conn));
        (
            outcome.err().and_then(|e| {
                if let ProtocolError::HeaderField { field, .. } = e { Some(field) } else { None }
            }),
            fes,
        )
    };
    let bad = |name| (Some(name), Some(Fes::INVALID_HEADER_FIELD));
    assert_eq!(judge(|_| {}), (None, None));
    assert_eq!(judge(|r| r.pfv = U16::new(1)), bad("PFV"));
    assert_eq!(judge(|r| r.cpda = 32), bad("CPDA"));
    assert_eq!(judge(|r| r.dgst = 1), bad("DGST"));
    assert_eq!(judge(|r| r.maxh2cdata = U32::new(4095)), bad("MAXH2CDATA"));
    assert_eq!(judge(|r| r.maxh2cdata = U32::new(4098)), bad("MAXH2CDATA"));
    assert_eq!(judge(|r| r.ch.hlen = 127), bad("HLEN"));
    assert_eq!(judge(|r| r.ch.plen = U32::new(129)), bad("PLEN"));
}

#[test]
fn a_read_lands_in_its_buffer_however_the_stream_is_cut() {
    for (digests, hpda) in [(0, 0), (1, 0), (2, 7), (3, 31)] {
        let digests = Digests(digests);
        let options = ConnectionOptions { digests, hpda, ..ConnectionOptions::new(2) };
        for piece in [1, 2, 7, 100, 5000, 1 << 20] {
            let mut conn = open(options, IcResp::new(0, digests, 8192));
            let data: Vec<u8> = (0..40_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
            let cid = conn.submit(read_command(), Data::In(vec![0; 40_000]), 42).unwrap();
            let other = conn.submit(read_command(), Data::In(vec![0; 10]), 43).unwrap();
            let command = sent(&mut conn, 33);
            assert_eq!(command.len(), 2 * (72 + if digests.header() { 4 } else { 0 }));

            let mut stream = c2h(cid, 0, &data[..30_000], 0, digests, hpda);
            stream.extend(c2h(other, 0, &[5; 10], SUCCESS, digests, hpda));
            stream.extend(c2h(cid, 30_000, &data[30_000..], SUCCESS, digests, hpda));
            feed(&mut conn, &stream, piece).unwrap();
            let done = conn.poll_completion().unwrap();
            assert_eq!(done.token, 43);
            let done = conn.poll_completion().unwrap();
            assert_eq!((done.token, done.cqe.status()), (42, Status::SUCCESS));
            assert!(matches!(done.data, Data::In(buf) if buf == data));
            assert!(conn.poll_completion().is_none());
            assert_eq!((conn.in_flight(), conn.free_slots()), (0, 2));
        }
    }
}

#[test]
fn small_data_travels_in_the_capsule_and_cannot_be_asked_for_again() {
    let digests = Digests(0).with_data(true);
    let options = ConnectionOptions { digests, in_capsule_bytes: 4096, ..ConnectionOptions::new(2) };
    let mut conn = open(options, IcResp::new(31, digests, 8192));
    let data = vec![0xA5; 4096];
    let cid = conn.submit(write_command(), Data::Out(data.clone()), 1).unwrap();
    let bytes = sent(&mut conn, 1000);
    let (capsule, _) = CapsuleCmd::read_from_prefix(&bytes).unwrap();
    assert_eq!(capsule.sqe.cid.get(), cid);
    assert_eq!(capsule.sqe.dptr, SglDescriptor::in_capsule(0, 4096));
    assert_eq!((capsule.ch.pdo, capsule.ch.plen.get()), (128, 128 + 4096 + 4), "aligned as CPDA asks");
    assert_eq!(&bytes[128..4224], &data[..]);
    assert_eq!(&bytes[4224..], crate::crc32c::crc32c(&data).to_le_bytes());

    let error = feed(&mut conn, R2t::new(cid, 0, 0, 4096).as_bytes(), 100).unwrap_err();
    assert!(matches!(error, ProtocolError::DataOutOfRange { expected: 4096, total: 4096, .. }));
    assert_eq!(termination(&mut conn), Fes::DATA_OUT_OF_RANGE);
}

#[test]
fn r2ts_are_answered_in_pieces_of_maxh2cdata() {
    let mut conn = plain(1);
    let data: Vec<u8> = (0..40_000u32).map(|i| (i / 11) as u8).collect();
    let cid = conn.submit(write_command(), Data::Out(data.clone()), 1).unwrap();
    assert_eq!(sent(&mut conn, 1000).len(), 72, "40000 bytes do not go into the capsule");

    // Two R2Ts at once, the second for the rest.
    let mut stream = R2t::new(cid, 0xAAAA, 0, 20_000).as_bytes().to_vec();
    stream.extend(R2t::new(cid, 0xBBBB, 20_000, 20_000).as_bytes());
    feed(&mut conn, &stream, 10).unwrap();
    let bytes = sent(&mut conn, 777);
    let mut rest = &bytes[..];
    let mut seen = Vec::new();
    let mut received: Vec<u8> = Vec::new();
    while !rest.is_empty() {
        let (header, body) = H2cData::read_from_prefix(rest).unwrap();
        let len = header.datal.get() as usize;
        assert_eq!((header.ch.pdo, header.ch.plen.get() as usize, header.cccid.get()), (24, 24 + len, cid));
        assert_eq!(header.datao.get() as usize, received.len());
        seen.push((header.ttag.get(), len, header.ch.has(LAST)));
        received.extend(&body[..len]);
        rest = &body[len..];
    }
    assert_eq!(
        seen,
        [
            (0xAAAA, 8192, false),
            (0xAAAA, 8192, false),
            (0xAAAA, 3616, true),
            (0xBBBB, 8192, false),
            (0xBBBB, 8192, false),
            (0xBBBB, 3616, true)
        ]
    );
    assert_eq!(received, data);
    feed(&mut conn, &response(cid, Status::SUCCESS), 100).unwrap();
    assert!(matches!(conn.poll_completion(), Some(Completion { token: 1, data: Data::Out(_), .. })));
}

#[test]
fn a_write_that_fails_early_keeps_its_buffer_until_it_is_sent() {
    let mut conn = plain(1);
    let cid = conn.submit(write_command(), Data::Out(vec![1; 20_000]), 1).unwrap();
    sent(&mut conn, 1000);
    let mut stream = R2t::new(cid, 0, 0, 20_000).as_bytes().to_vec();
    stream.extend(response(cid, Status::CAPACITY_EXCEEDED.with_dnr()));
    feed(&mut conn, &stream, 1000).unwrap();
    assert!(conn.poll_completion().is_none(), "its bytes still wait in the transmit queue");
    assert_eq!(sent(&mut conn, 999).len(), 20_000 + 3 * 24);
    let done = conn.poll_completion().unwrap();
    assert_eq!(done.cqe.status(), Status::CAPACITY_EXCEEDED.with_dnr());
}

#[test]
fn a_wrong_data_digest_fails_the_read_only() {
    let digests = Digests(0).with_data(true);
    let options = ConnectionOptions { digests, ..ConnectionOptions::new(4) };
    for success_flag in [true, false] {
        let mut conn = open(options, IcResp::new(0, digests, 8192));
        let cid = conn.submit(read_command(), Data::In(vec![0; 512]), 1).unwrap();
        let mut stream = c2h(cid, 0, &[9; 512], if success_flag { SUCCESS } else { LAST }, digests, 0);
        stream[100] ^= 1;
        if !success_flag {
            stream.extend(response(cid, Status::SUCCESS));
        }
        feed(&mut conn, &stream, 64).unwrap();
        assert_eq!(conn.poll_completion().unwrap().cqe.status(), Status::TRANSIENT_TRANSPORT_ERROR);
        assert!(conn.is_open());
    }
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let digests = Digests(0).with_header(true);
    let options = ConnectionOptions { digests, ..ConnectionOptions::new(4) };
    let mut conn = open(options, IcResp::new(0, digests, 8192));
    let cid = conn.submit(read_command(), Data::In(vec![0; 512]), 1).unwrap();
    sent(&mut conn, 1000);
    let mut stream = c2h(cid, 0, &[9; 512], SUCCESS, digests, 0);
    stream[12] ^= 1;
    assert!(matches!(feed(&mut conn, &stream, 9999), Err(ProtocolError::HeaderDigest { .. })));
    assert_eq!(termination(&mut conn), Fes::HEADER_DIGEST_ERROR);
    assert_eq!(conn.on_received(0), Err(ProtocolError::AlreadyFailed));
    let lost = conn.take_in_flight();
    assert!(matches!(&lost[..], [(1, Data::In(buf))] if buf.len() == 512));
}

/// What a hostile or broken controller may send, with one read (of 4096 bytes) and one write (of 16384) in flight.
#[test]
fn violations_end_the_connection_with_the_right_status() {
    type Attack = fn(read: u16, write: u16) -> Vec<u8>;
    let attacks: [(&str, Fes, Attack); 20] = [
        ("answer to nobody", Fes::INVALID_HEADER_FIELD, |_, _| response(0x3FF, Status::SUCCESS)),
        ("answer to an earlier use of the slot", Fes::INVALID_HEADER_FIELD, |r, _| {
            response(r ^ 0x400, Status::SUCCESS)
        }),
        ("data for nobody", Fes::INVALID_HEADER_FIELD, |_, _| c2h(9, 0, &[0; 4], LAST, Digests(0), 0)),
        ("data for a write", Fes::INVALID_HEADER_FIELD, |_, w| c2h(w, 0, &[0; 4], LAST, Digests(0), 0)),
        ("R2T for a read", Fes::INVALID_HEADER_FIELD, |r, _| R2t::new(r, 0, 0, 4096).as_bytes().to_vec()),
        ("R2T of nothing", Fes::DATA_OUT_OF_RANGE, |_, w| R2t::new(w, 0, 0, 0).as_bytes().to_vec()),
        ("R2T beyond the data", Fes::DATA_OUT_OF_RANGE, |_, w| R2t::new(w, 0, 0, 16385).as_bytes().to_vec()),
        ("R2T that wraps", Fes::DATA_OUT_OF_RANGE, |_, w| R2t::new(w, 0, 0, u32::MAX).as_bytes().to_vec()),
        ("R2T with a gap", Fes::DATA_OUT_OF_RANGE, |_, w| R2t::new(w, 0, 4096, 4096).as_bytes().to_vec()),
        ("more data than asked for", Fes::DATA_OUT_OF_RANGE, |r, _| {
            c2h(r, 0, &[0; 4097], LAST, Digests(0), 0)
        }),
        ("data with a gap", Fes::DATA_OUT_OF_RANGE, |r, _| c2h(r, 4, &[0; 4], LAST, Digests(0), 0)),
        ("success with half of the data", Fes::SEQUENCE_ERROR, |r, _| {
            c2h(r, 0, &[0; 2048], SUCCESS, Digests(0), 0)
        }),
        ("a response that says success without data", Fes::SEQUENCE_ERROR, |r, _| {
            response(r, Status::SUCCESS)
        }),
        ("success that is not last", Fes::INVALID_HEADER_FIELD, |r, _| {
            c2h(r, 0, &[0; 4096], flags::SUCCESS, Digests(0), 0)
        }),
        ("data without a byte", Fes::INVALID_HEADER_FIELD, |r, _| c2h(r, 0, &[], LAST, Digests(0), 0)),
        ("a digest that was not agreed", Fes::INVALID_HEADER_FIELD, |r, _| {
            c2h(r, 0, &[0; 4096], LAST, Digests(1), 0)
        }),
        ("PDO inside the header", Fes::INVALID_HEADER_FIELD, |r, _| {
            let mut pdu = c2h(r, 0, &[0; 4096], LAST, Digests(0), 0);
            pdu[3] = 4;
            pdu
        }),
        ("a length that does not add up", Fes::INVALID_HEADER_FIELD, |r, _| {
            let mut pdu = c2h(r, 0, &[0; 4096], LAST, Digests(0), 0);
            pdu[4] += 1;
            pdu
        }),
        ("a second greeting", Fes::SEQUENCE_ERROR, |_, _| {
            IcResp::new(0, Digests(0), 8192).as_bytes().to_vec()
        }),
        ("a PDU that only hosts send", Fes::SEQUENCE_ERROR, |_, _| {
            vec![pdu::CAPSULE_CMD, 0, 72, 0, 72, 0, 0, 0]
        }),
    ];
    for (name, fes, attack) in attacks {
        let mut conn = plain(2);
        let read = conn.submit(read_command(), Data::In(vec![0; 4096]), 1).unwrap();
        let write = conn.submit(write_command(), Data::Out(vec![0; 16384]), 2).unwrap();
        sent(&mut conn, 10_000);
        assert!(feed(&mut conn, &attack(read, write), 10_000).is_err(), "{name} was accepted");
        assert_eq!(termination(&mut conn), fes, "{name}");
        assert_eq!(conn.take_in_flight().len(), 2, "{name}: both buffers come back");
    }
}

#[test]
fn more_r2ts_than_agreed_are_refused() {
    let options = ConnectionOptions { max_r2t: 2, ..ConnectionOptions::new(1) };
    let mut conn = open(options, IcResp::new(0, Digests(0), 8192));
    let cid = conn.submit(write_command(), Data::Out(vec![0; 16384]), 1).unwrap();
    sent(&mut conn, 1000);
    let r2t = |n: u32| R2t::new(cid, n as u16, n * 4096, 4096).as_bytes().to_vec();
    feed(&mut conn, &[r2t(0), r2t(1)].concat(), 100).unwrap();
    sent(&mut conn, 1000);
    feed(&mut conn, &r2t(2), 100).expect("the first two have been answered in full");
    feed(&mut conn, &r2t(3), 100).unwrap();
    let mut conn = open(options, IcResp::new(0, Digests(0), 8192));
    conn.submit(write_command(), Data::Out(vec![0; 16384]), 1).unwrap();
    let error = feed(&mut conn, &[r2t(0), r2t(1), r2t(2)].concat(), 100).unwrap_err();
    assert!(matches!(error, ProtocolError::R2tLimit { limit: 2, .. }));
}

#[test]
fn a_termination_request_is_reported_and_not_answered() {
    let mut conn = plain(1);
    let term = TermReq::new(pdu::C2H_TERM_REQ, Fes::INVALID_HEADER_FIELD, 10, 8);
    let bytes = [term.as_bytes(), &[0; 8]].concat();
    let error = feed(&mut conn, &bytes, 5).unwrap_err();
    assert_eq!(error, ProtocolError::Terminated { fes: Fes::INVALID_HEADER_FIELD, fei: 10 });
    assert!(!conn.has_transmit());
}

#[test]
fn slots_run_out_and_come_back() {
    let mut conn = plain(2);
    let first = conn.submit(read_command(), Data::None, 1).unwrap();
    conn.submit(read_command(), Data::None, 2).unwrap();
    let refused = conn.submit(read_command(), Data::Out(vec![3]), 3).unwrap_err();
    assert_eq!(refused.why, RefusedWhy::Full);
    assert!(matches!(refused.data, Data::Out(_)));
    feed(&mut conn, &response(first, Status::SUCCESS), 100).unwrap();
    let again = conn.submit(read_command(), Data::None, 4).unwrap();
    assert_ne!(first, again, "the same slot has another identifier");
    assert_eq!(first & 0x3FF, again & 0x3FF);
    sent(&mut conn, 1000);
    let mut cid = again;
    for n in 0..1000 {
        feed(&mut conn, &response(cid, Status::SUCCESS), 100).unwrap();
        cid = conn.submit(read_command(), Data::None, n).unwrap();
        assert_ne!(cid, 0xFFFF, "reserved");
    }
}

proptest! {
    /// Random bytes, and a real stream with a few bytes changed, never panic and never write outside a buffer.
    #[test]
    fn noise_never_panics(
        noise in proptest::collection::vec(any::<u8>(), 0..600),
        flips in proptest::collection::vec((0usize..4500, any::<u8>()), 0..6),
        piece in 1usize..5000,
        digests in 0u8..4,
        greeted in any::<bool>(),
    ) {
        let digests = Digests(digests);
        let options = ConnectionOptions { digests, ..ConnectionOptions::new(3) };
        let mut conn = Conn::new(options);
        sent(&mut conn, 1000);
        if greeted {
            feed(&mut conn, IcResp::new(0, digests, 4096).as_bytes(), piece).unwrap();
            let read = conn.submit(read_command(), Data::In(vec![0; 4096]), 1).unwrap();
            let write = conn.submit(write_command(), Data::Out(vec![0; 16384]), 2).unwrap();
            sent(&mut conn, 1000);
            let mut stream = pdu_bytes(R2t::new(write, 1, 0, 5000), &[], digests, 0);
            stream.extend(c2h(read, 0, &[7; 4096], SUCCESS, digests, 0));
            stream.extend(pdu_bytes(CapsuleResp::new(Cqe::new(write, Status::SUCCESS)), &[], digests, 0));
            for (at, value) in flips {
                if let Some(byte) = stream.get_mut(at) {
                    *byte = value;
                }
            }
            let _ = feed(&mut conn, &stream, piece);
        }
        if conn.phase != Phase::Failed {
            let _ = feed(&mut conn, &noise, piece);
        }
        sent(&mut conn, 1000);
        while conn.poll_completion().is_some() {}
        conn.take_in_flight();
    }
}
