//! The connection machine, fed by hand.
#![forbid(unsafe_code)]

use super::*;

fn open(dgst: Digests) -> Connection {
    let mut conn = Connection::new(ConnectionLimits { max_h2c_data: 1 << 20 });
    let parsed = conn.parse(IcReq::new(0, dgst, 0).as_bytes());
    assert!(parsed.event.is_none() && conn.violation().is_none());
    conn
}

fn data_header(cid: u16, ttag: u16, len: u32, flags: u8) -> Vec<u8> {
    let mut header = H2cData::ref_from_bytes(&[0; size_of::<H2cData>()]).copied().unwrap();
    header.ch = CommonHeader::bare(pdu::H2C_DATA, size_of::<H2cData>());
    header.ch.flags = flags;
    header.ch.pdo = size_of::<H2cData>() as u8;
    header.ch.plen = (size_of::<H2cData>() as u32 + len).into();
    (header.cccid, header.ttag, header.datal) = (cid.into(), ttag.into(), len.into());
    header.as_bytes().to_vec()
}

/// The tag of the R2T that is the last thing to be sent.
fn last_tag(conn: &mut Connection) -> u16 {
    let mut pieces = [std::io::IoSlice::new(&[]); 8];
    let used = conn.transmit().gather(&mut pieces);
    let sent: Vec<u8> = pieces[..used].iter().flat_map(|piece| piece.iter().copied()).collect();
    let r2t = R2t::ref_from_bytes(&sent[sent.len() - size_of::<R2t>()..]).unwrap();
    r2t.ttag.get()
}

#[test]
fn a_payload_whose_command_is_aborted_reaches_no_other_command() {
    const LEN: usize = 1 << 20;
    let mut conn = open(Digests(0));
    conn.request_data(0, 0, DmaBuf::zeroed(LEN)).unwrap();
    let tag = last_tag(&mut conn);
    let mut begun = data_header(0, tag, LEN as u32, flags::LAST_PDU);
    begun.resize(begun.len() + 1000, 0xEE);
    assert!(conn.parse(&begun).event.is_none());
    // More are given up than are remembered, so the entry of the first is given away under the payload.
    for token in 0..3000 {
        assert!(token == 0 || conn.request_data(token, token as u16, DmaBuf::zeroed(4096)).is_ok());
        assert!(conn.abandon_data(token));
    }
    for token in 3000..4000 {
        conn.request_data(token, token as u16, DmaBuf::zeroed(4096)).unwrap();
    }
    let (owed, waiting) = (conn.bytes_owed(), conn.transfers_waiting());
    assert!(conn.payload_room().is_none(), "it goes nowhere");
    let rest = vec![0xEE; LEN - 1000];
    let parsed = conn.parse(&rest);
    assert!(parsed.event.is_none() && parsed.consumed == rest.len());
    assert_eq!((conn.bytes_owed(), conn.transfers_waiting()), (owed, waiting));
    let capsule = CapsuleCmd::ref_from_bytes(&[0; size_of::<CapsuleCmd>()]).copied().unwrap();
    let capsule = CapsuleCmd { ch: CommonHeader::bare(pdu::CAPSULE_CMD, size_of::<CapsuleCmd>()), ..capsule };
    assert!(matches!(conn.parse(capsule.as_bytes()).event, Some(Event::Command { .. })), "in step");
}

#[test]
fn a_header_that_arrived_wrong_is_judged_by_its_digest_alone_and_at_once() {
    let mut conn = open(Digests(1));
    // A flag that does not exist, no data yet, and a digest that does not fit.
    let mut pdu = data_header(1, 0xFFFF, 4096, 0x80 | flags::HDGSTF);
    pdu.extend_from_slice(&[1, 2, 3, 4]);
    assert!(conn.parse(&pdu[..pdu.len() - 1]).starved && conn.violation().is_none());
    conn.parse(&pdu);
    assert_eq!(conn.violation(), Some(Violation { fes: Fes::HEADER_DIGEST_ERROR, fei: 0x0403_0201 }));
}

#[test]
fn padding_is_part_of_the_data_and_of_its_digest() {
    let mut conn = open(Digests(2));
    let before = conn.transmit().pending();
    conn.send_padded(5, DmaSlice::copy_of(&[7; 100]), 1_000_000, false);
    assert_eq!(conn.transmit().pending() - before, size_of::<C2hData>() + 1_000_000 + DIGEST_LEN);
    assert!(conn.transmit().pending_copied() < 400, "zeros are not copied");
    let mut pieces = [std::io::IoSlice::new(&[]); 64];
    let used = conn.transmit().gather(&mut pieces);
    let sent: Vec<u8> = pieces[..used].iter().flat_map(|piece| piece.iter().copied()).collect();
    let data = &sent[sent.len() - DIGEST_LEN - 1_000_000..sent.len() - DIGEST_LEN];
    assert!(data[..100].iter().all(|&b| b == 7) && data[100..].iter().all(|&b| b == 0));
    assert_eq!(sent[sent.len() - DIGEST_LEN..], crate::crc32c::crc32c(data).to_le_bytes());
}
