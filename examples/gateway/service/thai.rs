//! What refusals say to Thai readers.

/// By code, for the layer's refusals and for the gateway's own.
pub fn message(code: &str) -> &'static str {
    match code {
        "idempotency_key_required" => "ต้องส่ง Idempotency-Key หนึ่งค่าต่อหนึ่งรายการ และใช้ค่าเดิมทุกครั้งที่ส่งซ้ำ",
        "idempotency_key_invalid" => "ค่า Idempotency-Key ไม่ถูกต้อง",
        "idempotency_key_reused" => {
            "Idempotency-Key นี้ถูกใช้กับคำขออื่นแล้ว โปรดตรวจสอบผลของคำขอเดิมก่อนใช้ค่าใหม่"
        }
        "idempotency_in_flight" => "คำขอเดิมกำลังดำเนินการอยู่ โปรดส่งคำขอเดิมอีกครั้งในภายหลัง",
        "idempotency_response_not_retained" => {
            "คำขอนี้ดำเนินการเสร็จแล้ว แต่ไม่ได้เก็บคำตอบไว้ โปรดตรวจสอบสถานะของรายการ"
        }
        "idempotency_outcome_unknown" => {
            "ไม่ทราบผลของคำขอก่อนหน้า โปรดตรวจสอบสถานะของรายการ ห้ามใช้ค่าใหม่"
        }
        "idempotency_body_too_large" | "body_too_large" => "เนื้อหาของคำขอใหญ่เกินกำหนด",
        "idempotency_body_incomplete" | "body_incomplete" => {
            "ได้รับเนื้อหาของคำขอไม่ครบ โปรดส่งอีกครั้งด้วยค่าเดิม"
        }
        "idempotency_body_invalid" => "อ่านเนื้อหาของคำขอไม่ได้",
        "unauthorized" => "ไม่พบสิทธิ์การใช้งาน",
        "signature_invalid" => "ลายเซ็นของคำขอไม่ถูกต้อง",
        "nonce_replayed" => "PG-Nonce นี้ถูกใช้ไปแล้ว โปรดใช้ค่าใหม่ทุกครั้งที่ส่ง",
        "rate_limited" => "ส่งคำขอถี่เกินไป โปรดส่งคำขอเดิมอีกครั้งในภายหลัง",
        "not_found" => "ไม่พบสิ่งที่ร้องขอ",
        "method_not_allowed" => "เส้นทางนี้ไม่รองรับเมธอดที่ใช้",
        "upload_token_invalid" => "โทเคนสำหรับส่งสลิปไม่ถูกต้องหรือหมดอายุแล้ว",
        "image_too_large" => "รูปภาพใหญ่เกิน 4 MiB",
        "already_done" => "Idempotency-Key นี้สร้างรายการไปแล้ว โปรดตรวจสอบรายการเดิม",
        "request_invalid" => "ข้อมูลในคำขอไม่ถูกต้อง",
        "internal" => "ระบบขัดข้อง และยังไม่ได้ดำเนินการตามคำขอนี้",
        // What is left is ours: out of reach, or too busy.
        _ => "ระบบไม่พร้อมให้บริการชั่วคราว โปรดส่งคำขอเดิมอีกครั้งด้วยค่าเดิม",
    }
}
