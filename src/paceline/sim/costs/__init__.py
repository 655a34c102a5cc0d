"""What passes, questions to drafters and steps take: measured, from data sheets, or published."""
